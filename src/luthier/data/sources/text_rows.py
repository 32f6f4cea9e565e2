"""Plain text: a row a paragraph, line or file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.data.report import BadRow
from luthier.data.sources.lines import lines, not_utf8, whole_text
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
            yield not_utf8(text) or {"text": text.replace("\r\n", "\n")}, Origin(str(path), 1)
        return
    held: list[str] = []
    start = 1
    fault: tuple[BadRow, Origin] | None = None
    for number, line in lines(path):
        if isinstance(line, BadRow):
            # the row that this line belongs to is bad as a whole
            fault = fault or (line, Origin(str(path), number))
            blank = False
        else:
            blank = not line.strip()
            if not blank:
                start = start if held else number
                held.append(line.rstrip("\r\n"))
        if (blank or unit == "line") and (held or fault):
            yield fault or ({"text": "\n".join(held)}, Origin(str(path), start))
            held, fault = [], None
    if held or fault:
        yield fault or ({"text": "\n".join(held)}, Origin(str(path), start))
