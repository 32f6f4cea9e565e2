"""Parquet and Arrow files. Keys that Arrow filled with null, so that all rows have one schema, are taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from luthier.data.report import BadRow
from luthier.data.sources.lines import opened
from luthier.data.sources.origin import Origin
from luthier.errors import DataError

_ROWS_AT_ONCE = 256


def read_parquet(path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """Rows of a Parquet file, read in pieces."""
    with opened(path) as stream:
        try:
            batches = pyarrow.parquet.ParquetFile(_seekable(path, stream)).iter_batches(batch_size=_ROWS_AT_ONCE)
            yield from _rows(batches, path)
        except pyarrow.ArrowException as error:
            raise DataError(f"is not a Parquet file that can be read ({_first(error)})", where=str(path)) from error


def read_arrow(path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """Rows of an Arrow file or an Arrow stream (what `datasets` saves)."""
    with opened(path) as stream:
        try:
            source = _seekable(path, stream)
            try:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = iter(pyarrow.ipc.open_stream(source))
            yield from _rows(batches, path)
        except pyarrow.ArrowException as error:
            raise DataError(f"is not an Arrow file that can be read ({_first(error)})", where=str(path)) from error


def without_null_keys(value: Any) -> Any:
    """The value without the null keys of its inner objects, as it was before Arrow made all rows alike."""
    if isinstance(value, dict):
        return {key: without_null_keys(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_null_keys(inner) for inner in value]
    return value


def _rows(batches: Iterator[Any], path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    number = 0
    for batch in batches:
        doubled = sorted({name for name in batch.schema.names if batch.schema.names.count(name) > 1})
        if doubled:
            raise DataError(f"there is more than one column {doubled[0]!r}", where=str(path))
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            piece = batch.slice(start, _ROWS_AT_ONCE)
            for row in _values(piece):
                number += 1
                yield row, Origin(str(path), number, "row")


def _values(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """Rows of a batch; one with a text that is not UTF-8 comes as a BadRow."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # one value spoils the conversion of all
        for index in range(batch.num_rows):
            yield _value_by_value(batch, index)
        return
    for row in rows:
        yield {key: without_null_keys(value) for key, value in row.items()}


def _value_by_value(batch: Any, index: int) -> dict[str, Any] | BadRow:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = without_null_keys(column[index].as_py())
        except UnicodeDecodeError as error:
            what = f"column {name!r} holds byte 0x{error.object[error.start]:02x}, which is not UTF-8"
            return BadRow(what, reason="not UTF-8")
        except (ValueError, OverflowError):
            # a date that Python does not have: it stands for itself, so that a column nobody asks for changes nothing
            row[name] = column[index]
    return row


def _seekable(path: Path, stream: BinaryIO) -> Any:
    # both formats keep their index at the end, so what cannot seek has to be in memory
    if path.suffix.lower() in (".gz", ".zst"):
        return pyarrow.BufferReader(stream.read())
    return pyarrow.PythonFile(stream, mode="r")


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
