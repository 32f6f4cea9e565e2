"""Plain text: a row a paragraph, line or file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.data.report import BadRow
from luthier.data.sources.lines import lines, whole_text
from luthier.data.sources.origin import Origin

UNITS = ("paragraph", "line", "file")


def read_txt(path: Path, unit: str) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """Rows with the one column `text`.

    Args:
        path: a UTF-8 file.
        unit: "paragraph" (blank lines stand between), "line", or "file".
    """
    if unit == "file":
        text = whole_text(path)
        if text.strip():
            yield {"text": text.replace("\r\n", "\n")}, Origin(str(path), 1)
        return
    held: list[str] = []
    start = 1
    for number, line in lines(path):
        if isinstance(line, BadRow):
            yield line, Origin(str(path), number)
            continue
        text = line.rstrip("\r\n")
        if text.strip():
            if not held:
                start = number
            held.append(text)
        if held and (unit == "line" or not text.strip()):
            yield {"text": "\n".join(held)}, Origin(str(path), start)
            held = []
    if held:
        yield {"text": "\n".join(held)}, Origin(str(path), start)
