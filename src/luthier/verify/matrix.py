"""Every causal model type on every layout: groups that are started once walk through them all.

What has been found is kept in a file after every model, so a run that was cut short goes on where it was.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.hf.debug.shrink import VOCABULARY
from luthier.hf.debug.tiny import causal_types, debug_config
from luthier.hf.kinds import never_causal, not_causal
from luthier.verify import group
from luthier.verify.group import Failed, Group
from luthier.verify.run import require_peft
from luthier.verify.table import page
from luthier.verify.trial import Cell, Trial, documents

COLUMNS: dict[str, tuple[int, dict[str, int], bool]] = {
    "one process": (1, {}, False),
    "LoRA": (1, {}, True),
    "dp_shard 2": (2, {"dp_shard": 2}, False),
    "tp 2": (2, {"tp": 2}, False),
    "cp 2": (2, {"cp": 2}, False),
    "pp 2": (2, {"pp": 2}, False),
    "ep 2": (2, {"dp_shard": 2, "ep": 2}, False),
    "dp 2 x tp 2": (4, {"dp_shard": 2, "tp": 2}, False),
    "pp 2 x dp 2": (4, {"pp": 2, "dp_shard": 2}, False),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}, False),
}
"""Column -> ranks, degrees, with LoRA."""

LENGTHS, STEPS = (23, 7, 12, 18), 2
"""Of the documents: longer than the tiny models' windows of 16 positions, and shorter."""

TIMEOUT = 300.0
"""Seconds that a model may take on one layout."""


def run(
    scratch: Path,
    results: Path,
    *,
    resume: bool = False,
    types: Sequence[str] | None = None,
    columns: Sequence[str] = tuple(COLUMNS),
    told: Callable[[str], None] = print,
) -> dict[str, dict[str, Any]]:
    """Walk through the types.

    Args:
        scratch: a directory for files of the moment.
        results: a JSON file of what was found, written after every model.
        resume: keep what that file calls right or refused, and measure the rest.
        types: which ones; all when left out.
        columns: which layouts.
        told: gets a line for each cell.

    Returns:
        what is in `results`: model type -> {"class", "kind", "cells"}.

    Raises:
        UserError: a column has adapters, and PEFT is not installed.
    """
    if any(COLUMNS[column][2] for column in columns):
        require_peft()
    found: dict[str, dict[str, Any]] = {}
    if results.is_file() and resume:
        found = json.loads(results.read_text(encoding="utf-8"))
    scratch.mkdir(parents=True, exist_ok=True)
    groups = {n: group.ranks(n, scratch / f"ranks-{n}.log", TIMEOUT) for n in {COLUMNS[name][0] for name in columns}}
    reference = group.reference(scratch / "reference.log", TIMEOUT)
    try:
        for kind in types or causal_types():
            known = found.setdefault(kind, {})
            done = known.get("cells", {})
            left = [name for name in columns if done.get(name, {}).get("status") not in ("right", "refused")]
            if resume and known.get("kind"):
                continue
            if resume and not left:
                continue
            measured = _type(kind, left if resume else columns, scratch, groups, reference, told)
            known |= {**measured, "cells": {**done, **measured.get("cells", {})}}
            _write(results, found)
    finally:
        for one in (*groups.values(), reference):
            one.close()
    return found


def _type(
    kind: str,
    columns: Sequence[str],
    scratch: Path,
    groups: Mapping[int, Group],
    reference: Group,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """Measure one type: {"class", "kind", "cells"}."""
    reason = never_causal(kind)
    if reason is None:
        config = debug_config(kind)
        reason = not_causal(config)
    if reason is not None:
        told(f"{kind}: {reason}")
        return {"kind": reason}
    directory = scratch / "model"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    cells: dict[str, Any] = {}
    try:
        made = reference.call("make", directory=str(directory))
    except Failed as error:
        told(f"{kind}: {error}")
        return {
            "kind": None,
            "cells": {name: _plain(Cell(name, "failed", str(error), error.trace)) for name in columns},
        }
    trial = Trial({"path": str(directory)}, documents(VOCABULARY, LENGTHS, STEPS), scratch / "files", reference)
    for name in columns:
        ranks, parallel, lora = COLUMNS[name]
        cell = trial.cell(groups[ranks], parallel, lora=lora, name=name)
        cells[name] = _plain(cell)
        told(f"{kind}, {name}: {cell.status} {'' if cell.measured is None else f'{cell.error:.1e} '}{cell.reason}")
    return {"kind": None, "class": made["class"], "parameters": made["parameters"], "cells": cells}


def _plain(cell: Cell) -> dict[str, Any]:
    """What is kept of a cell."""
    kept: dict[str, Any] = {"status": cell.status, "reason": cell.reason}
    if cell.status not in ("right", "refused"):
        kept["trace"] = cell.trace[-4000:]
    if cell.measured is not None and cell.bounds is not None:
        gradients = cell.measured["gradients"]
        kept |= {"error": cell.error, "equal": gradients["equal"], "tensors": gradients["tensors"]}
        kept |= {"packed": cell.measured["packed"], "bound": cell.bounds.gradient}
    if cell.widened is not None:
        kept["widened"] = float(cell.widened["gradients"]["worst"])
    return kept


def _write(results: Path, found: Mapping[str, Any]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    aside = results.with_suffix(".partial")
    aside.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    aside.rename(results)


def write_page(found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Write what was found as a page of the documentation."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    file.write_text(page(dict(sorted(found.items())), tuple(COLUMNS), versions), encoding="utf-8")
