"""Measures the well-known models of `models.yaml`: `python -m luthier.estimate.remeasure DIRECTORY [NAME...]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from luthier.config import RunConfig
from luthier.estimate.measured import MOST, About, file_name, to_json
from luthier.estimate.models import known
from luthier.estimate.prepare import prepare, refusals


def remeasured(full: str) -> str:
    """The file of a model, anew."""
    config = RunConfig.model_validate({"model": full, "data": {}})
    prepared = prepare(config, cpu=False)
    about = About(type(prepared.model).__name__, prepared.adapter, prepared.precision, prepared.shape)
    refusal = refusals(prepared, config)
    names = [name for name in MOST if name != "ep" or prepared.shape.has_experts]
    admitted = {
        name: frozenset(d for d in range(1, MOST[name] + 1) if d == 1 or refusal(name, d) is None) for name in names
    }
    return json.dumps(to_json(about, admitted), separators=(",", ":")) + "\n"


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    for full in sys.argv[2:] or known():
        (directory / file_name(full)).write_text(remeasured(full), encoding="utf-8")
        print(full, file=sys.stderr)


if __name__ == "__main__":
    main()
