"""A source's rows, whatever it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.config.sections import SourceConfig
from luthier.config.split import parse_split
from luthier.data.report import BadRow
from luthier.data.sources import hub
from luthier.data.sources.arrow_rows import read_arrow, read_parquet
from luthier.data.sources.csv_rows import read_csv
from luthier.data.sources.find import find_files, kind_of
from luthier.data.sources.json_rows import read_json, read_jsonl
from luthier.data.sources.origin import Origin
from luthier.data.sources.splits import part_of
from luthier.data.sources.text_rows import UNITS, read_txt
from luthier.errors import ConfigError

RawRow = tuple[dict[str, Any] | BadRow, Origin]
"""A row, or what is wrong with it, and where it stands."""


def read_file(path: Path, unit: str = "paragraph") -> Iterator[RawRow]:
    """Rows of one file, by its suffix.

    Args:
        path: the file; `find_files` has checked its suffix.
        unit: what a row of a text file is.

    Raises:
        DataError: the file as a whole cannot be read. A single bad row comes as a BadRow instead.
    """
    match kind_of(path):
        case "jsonl":
            return read_jsonl(path)
        case "json":
            return read_json(path)
        case "csv":
            return read_csv(path)
        case "parquet":
            return read_parquet(path)
        case "arrow":
            return read_arrow(path)
        case "txt":
            return read_txt(path, unit)
        case _:
            raise AssertionError(f"no reader for {path}")


def read_rows(source: SourceConfig, files: list[Path] | None = None, loaded: Any = None) -> Iterator[RawRow]:
    """The first `source.rows` rows of a source, bad ones among them.

    Args:
        source: the source.
        files: its files, where they have been found already.
        loaded: its `datasets` object, where it has been loaded already.

    Raises:
        DataError: there is no such source, or one of its files cannot be read.
    """
    if source.path.startswith(hub.PREFIX):
        rows = hub.read_hub(loaded if loaded is not None else hub.load(source, streaming=True), source)
    else:
        if source.subset is not None:
            raise ConfigError("only a data set of the Hub (hf://) has one", where="data.*.subset")
        unit, part = text_unit(source), parse_split(source.split)[1]
        found = files if files is not None else files_of(source)
        rows = part_of(lambda: (row for file in found for row in read_file(file, unit)), part)
    return itertools.islice(rows, source.rows)


def files_of(source: SourceConfig) -> list[Path]:
    """The files of a source that is not of the Hub.

    Raises:
        UserError: there is nothing there that can be read.
    """
    return find_files(source.path, parse_split(source.split)[0], source.kind)


def text_unit(source: SourceConfig) -> str:
    """What a row of a text file is (`options.rows`)."""
    unit = source.options.get("rows", "paragraph")
    if unit not in UNITS:
        raise ConfigError(f"{unit!r} is not one of {', '.join(UNITS)}", where="data.*.options.rows")
    return str(unit)
