"""Comma-separated values: the separator is found, quotes may be doubled, fields may hold newlines."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.data.report import BadRow
from luthier.data.sources.lines import escaped_lines, not_utf8
from luthier.data.sources.origin import Origin
from luthier.errors import DataError

_SEPARATORS = ",;\t|"


class _Feed:
    """Lines for csv.reader.

    One that is not UTF-8 is fed with its bytes escaped: its quotes say where the record ends, which is bad as a whole.

    Attributes:
        number: of the newest line.
        bad: what is wrong with the first line of the record that is not UTF-8, and where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = escaped_lines(path)
        self.number = 0
        self.bad: tuple[BadRow, Origin] | None = None

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if self.bad is None and (fault := not_utf8(line)) is not None:
            self.bad = fault, Origin(str(self._path), self.number)
        return line


def read_csv(path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """A row a record, its columns named by the first one; a record of another width comes as a BadRow.

    Raises:
        DataError: the header is unusable.
    """
    csv.field_size_limit(sys.maxsize)
    feed = _Feed(path)
    header_line = next((line for line in feed if line.strip()), None)
    if header_line is None:
        return
    separator = "\t" if ".tsv" in path.suffixes else _separator(header_line)
    # quotes in the header may span lines, so the reader starts from the header line itself
    reader = csv.reader(_Chained(header_line, feed), delimiter=separator, strict=True)
    try:
        header = next(reader)
    except csv.Error as error:
        raise DataError(f"the header cannot be read ({error})", where=f"{path}:1") from error
    if feed.bad is not None:
        fault, place = feed.bad
        raise fault.at(str(place))
    _check_header(header, path)
    while True:
        start = feed.number + 1
        feed.bad = None
        origin = Origin(str(path), start)
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRow(f"the record that begins here cannot be read ({error})", reason="not CSV"), origin
            continue
        if feed.bad is not None:
            yield feed.bad
        elif not record or (len(record) == 1 and not record[0].strip() and len(header) > 1):
            continue
        elif len(record) != len(header):
            what = f"has {len(record)} fields where the header has {len(header)}"
            yield BadRow(what, reason="wrong number of fields"), origin
        else:
            yield dict(zip(header, record, strict=True)), origin


class _Chained:
    def __init__(self, first: str, rest: _Feed) -> None:
        self._first: str | None = first
        self._rest = rest

    def __iter__(self) -> _Chained:
        return self

    def __next__(self) -> str:
        if self._first is not None:
            line, self._first = self._first, None
            return line
        return next(self._rest)


def _separator(line: str) -> str:
    """The separator that the header uses most outside quotes; a comma if it uses none."""
    outside = "".join(line.split('"')[::2])
    best = max(_SEPARATORS, key=outside.count)
    return best if outside.count(best) else ","


def _check_header(header: list[str], path: Path) -> None:
    # columns without a name (an index that was written along) cannot be asked for
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise DataError(f"the header names column {doubled[0]!r} more than once", where=f"{path}:1")
