"""Where a row came from, for messages."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """A place in a source.

    Attributes:
        file: path of the file, or name of the data set.
        number: counted from 1.
        unit: what `number` counts: lines of a text file, or rows of a table.
    """

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.unit == "line" else f"{self.file}:row {self.number}"
