"""What was found, for people: the lines of one model's proof, and the page of all model types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from luthier.verify.trial import Bounds, Cell

_LAYOUT = re.compile(r"^\w+ cannot run on \w+ \d+: ")
REFUSED, WRONG, KIND = "–", "✗", "kind"


def lines(cells: Iterable[Cell], about: Mapping[str, Any]) -> list[str]:
    """The proof of one model, a block for each layout.

    Args:
        cells: what was measured.
        about: "model", "class", "parameters", "steps", "tokens" and "precision".
    """
    told = [
        f"{about['model']}: {about['class']}, {about['parameters']:,} parameters",
        f"{about['steps']} steps of {about['tokens']} tokens in {about['precision']}, beside unmodified Transformers "
        "in one process, each document alone",
    ]
    for cell in cells:
        told += ["", f"{cell.layout}: {cell.status}" + (f" ({cell.reason})" if cell.reason else "")]
        if cell.measured is None or cell.export is None or cell.bounds is None:
            continue
        measured, gradients, export, bounds = cell.measured, cell.measured["gradients"], cell.export, cell.bounds
        rows = [
            (
                "loss",
                f"{measured['losses'][0]:.6f} ... {measured['losses'][-1]:.6f}",
                measured["loss_error"],
                bounds.loss,
            ),
            (
                "gradient norm",
                f"{measured['norms'][0]:.6f} ... {measured['norms'][-1]:.6f}",
                measured["norm_error"],
                bounds.gradient,
            ),
            ("gradients", f"worst in {gradients['tensor']}", gradients["worst"], bounds.gradient),
        ]
        told += [
            f"  {name:<14} {what:<48} off by {error:.1e}, allowed {bound:.0e}" for name, what, error, bound in rows
        ]
        if cell.widened is not None:
            wide, allowed = cell.widened["gradients"], Bounds.of("float64", narrow=False).gradient
            what = f"worst in {wide['tensor']}"
            told.append(f"  {'without fp32':<14} {what:<48} off by {wide['worst']:.1e}, allowed {allowed:.0e}")
        told.append(f"  {'bit for bit':<14} {gradients['equal']} of {gradients['tensors']} gradients")
        copies = measured["copies"]
        told.append(f"  {'copies':<14} {'equal on all ranks' if not copies else 'differ: ' + ', '.join(copies)}")
        told.append(f"  {'export':<14} {export['equal']} of {export['tensors']} weights equal when read back")
        if measured["adapters"]:
            told.append(f"  {'adapters':<14} {measured['adapters']}")
    return told


def page(types: Mapping[str, Mapping[str, Any]], columns: Sequence[str], versions: Mapping[str, str]) -> str:
    """docs/architectures.md.

    Args:
        types: model type -> {"class", "kind" (why it is none of ours, or None), "cells": column -> {"status", "reason",
            "error", "packed"}}.
        columns: names of the layouts, in order.
        versions: of what it was made with.
    """
    notes: dict[str, int] = {}

    def note(reason: str) -> str:
        reason = _LAYOUT.sub("", reason)
        reason = re.sub(rf"^{reason.partition(' ')[0]} (?=has|works|computes)", "it ", reason)
        return f"<sup>{notes.setdefault(reason, len(notes) + 1)}</sup>"

    def shown(cell: Mapping[str, Any] | None) -> str:
        if cell is None:
            return "?"
        if cell["status"] == "right":
            return f"{cell['error']:.0e}".replace("e-0", "e-")
        mark = REFUSED if cell["status"] == "refused" else WRONG
        return f"{mark} {note(cell['reason'])}"

    rows = []
    for name, known in types.items():
        start = f"| {name} | {known.get('class', '')} |"
        if known.get("kind"):
            rows.append(f"{start} {' | '.join([f'{REFUSED} {note(known[KIND])}'] * len(columns))} |")
            continue
        cells = known.get("cells", {})
        rows.append(f"{start} {' | '.join(shown(cells.get(column)) for column in columns)} |")
    return "\n".join([*_head(types, columns, versions), *rows, "", *_widened(types, columns), *_notes(notes)]) + "\n"


def counts(types: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Column -> how many types are right, refused, or wrong there; kinds that are none of ours are not counted."""
    found = {}
    for column in columns:
        cells = [known["cells"].get(column) for known in types.values() if not known.get("kind") and "cells" in known]
        statuses = [cell["status"] for cell in cells if cell is not None]
        found[column] = {
            "right": statuses.count("right"),
            "refused": statuses.count("refused"),
            "wrong": len(statuses) - statuses.count("right") - statuses.count("refused"),
        }
    return found


def _head(types: Mapping[str, Mapping[str, Any]], columns: Sequence[str], versions: Mapping[str, str]) -> list[str]:
    found = counts(types, columns)
    others = sum(1 for known in types.values() if known.get("kind"))
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        "# Architectures",
        "",
        "`make matrix` writes this page: every type of Transformers' causal mapping, made tiny with large random",
        "weights, trained for two steps and held against unmodified Transformers (PEFT for LoRA) in one process,",
        "each document alone, in float64. A number is the largest difference of a gradient over the largest entry",
        "of its tensor, the worst of all tensors and steps. To be right a cell must also have the loss and the",
        "gradient norm of the reference in both steps, equal copies on all ranks, and an export that",
        "`from_pretrained` reads back bit for bit. The bound is 1e-10, and 1e-6 where the model itself computes",
        "in fp32 inside, 2e-6 of a type that refuses float64 and is in fp32 on both sides. Where such a model is",
        "further off than that, since large numbers cancel in what it adds in fp32, both sides are run once more with",
        "float64 in the place of the model's fp32, and must then agree to 1e-10, which leaves no room for another",
        "cause; as it computes, it may be off by 1e-4 at most. Those cells are listed below the table.",
        "",
        f"{REFUSED} is refused before weights load, {WRONG} is wrong; the notes at the end say why. Made with {said}.",
        "",
        f"{len(types)} types. {others} are no causal language models of text, and are refused by kind. Of the other "
        f"{len(types) - others}:",
        "",
        "| | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
        *(
            f"| {status} | " + " | ".join(str(found[column][status]) for column in columns) + " |"
            for status in ("right", "refused", "wrong")
        ),
        "",
        "| type | class | " + " | ".join(columns) + " |",
        "| --- | --- |" + " --- |" * len(columns),
    ]


def _widened(types: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """The cells that were run once more with float64 in the place of fp32."""
    rows = []
    for name, known in types.items():
        for column in columns:
            cell = known.get("cells", {}).get(column, {})
            if "widened" in cell:
                rows.append(f"| {name} | {column} | {cell['error']:.1e} | {cell['widened']:.0e} |")
    if not rows:
        return []
    return [
        "## Run once more with float64 in the place of fp32",
        "",
        "| type | layout | off by as it computes (allowed 1e-4) | off by without fp32 (allowed 1e-10) |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _notes(notes: Mapping[str, int]) -> list[str]:
    return ["## Notes", "", *(f"{number}. {reason}" for reason, number in notes.items())]
