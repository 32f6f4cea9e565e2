"""The answers of two models beside each other, as a file to look at: .html, .md or .jsonl."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.errors import ConfigError

Row = Mapping[str, Any]
"""row, prompt, expected, base, tuned, and scores: column -> metric -> number."""
COLUMNS = ("prompt", "expected", "base", "tuned")

_STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;margin:2rem;color:#1b1b1b}table{border-collapse:collapse;width:100%}
th,td{border:1px solid #d5d5d5;padding:.5rem .6rem;vertical-align:top;text-align:left;white-space:pre-wrap;width:25%}
th{background:#f4f4f4;position:sticky;top:0}.same{background:#e9f7ea}.small{color:#777;font-size:12px;display:block}
"""


def write_side_by_side(path: Path, rows: Sequence[Row], summary: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Write the file whole or not at all.

    Args:
        path: its suffix says the form.
        rows: one for each question.
        summary: "base" and "tuned" -> metric -> mean.
        title: of the page.

    Raises:
        ConfigError: the form is not known, or the file cannot be written.
    """
    text = form_of(path)(rows, summary, title)
    aside = path.with_name(f".{path.name}.aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error.strerror}", where=str(path)) from error


def form_of(path: Path) -> Callable[[Sequence[Row], Mapping[str, Mapping[str, float]], str], str]:
    """How a file of this name is written.

    Raises:
        ConfigError: its suffix is not known.
    """
    forms = {".html": _html, ".md": _markdown, ".jsonl": _jsonl}
    if path.suffix not in forms:
        remedy = "name a file that ends in .html, .md or .jsonl"
        raise ConfigError(f"{path.suffix or 'no suffix'} is no form of it", where="--side-by-side", remedy=remedy)
    return forms[path.suffix]


def _means(summary: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for values in summary.values() for name in values))
    return [f"{name}: base {summary['base'][name]:.4f}, tuned {summary['tuned'][name]:.4f}" for name in names]


def _jsonl(rows: Sequence[Row], summary: Mapping[str, Mapping[str, float]], title: str) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _markdown(rows: Sequence[Row], summary: Mapping[str, Mapping[str, float]], title: str) -> str:
    parts = [f"# {title}", *(f"- {line}" for line in _means(summary))]
    for row in rows:
        parts.append(f"\n## {row['row']}\n")
        for column in COLUMNS:
            quoted = "\n".join(f"> {line}".rstrip() for line in str(row[column]).splitlines() or [""])
            parts.append(f"**{column}**{_scored(row, column)}\n\n{quoted}\n")
    return "\n".join(parts) + "\n"


def _html(rows: Sequence[Row], summary: Mapping[str, Mapping[str, float]], title: str) -> str:
    said = html.escape(title)
    lines = ["<!doctype html>", f'<html lang="en"><meta charset="utf-8"><title>{said}</title>']
    lines += [f"<style>{_STYLE}</style>", f"<h1>{said}</h1>"]
    lines += [f"<p>{html.escape(line)}</p>" for line in _means(summary)]
    lines += ["<table><tr>" + "".join(f"<th>{column}</th>" for column in COLUMNS) + "</tr>"]
    for row in rows:
        cells = []
        for column in COLUMNS:
            same = column in ("base", "tuned") and row[column] == row["expected"]
            text = html.escape(str(row[column]))
            below = html.escape(str(row["row"])) if column == "prompt" else html.escape(_scored(row, column))
            cells.append(f'<td{" class=same" if same else ""}>{text}<span class="small">{below}</span></td>')
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table></html>"]) + "\n"


def _scored(row: Row, column: str) -> str:
    scores = row["scores"].get(column, {})
    return "".join(f" {name} {value:.3f}" for name, value in scores.items())
