"""Splits of what lies in files, by the names that the Hub gives to files, and parts of splits ("train[:10%]")."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from luthier.config.split import Slice
from luthier.errors import DataError

WHERE = "data.*.split"
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"([\w.-]+)-\d{5,}-of-\d{5,}\b")
Row = TypeVar("Row")


def of_split(files: Sequence[Path], directory: Path, name: str) -> list[Path]:
    """The files of a directory that belong to a split.

    A file belongs to the split that its name, else the nearest directory's, has a word of, or that stands before
    "-00000-of-00001". Train has the others, and shards of any other name where no file is named after train.

    Raises:
        DataError: none does; names the splits that there are.
    """
    splits = {file: split_of(file.relative_to(directory)) or "train" for file in files}
    wanted = next((split for split, words in _WORDS.items() if name in words), name)
    found = [file for file in files if splits[file] == wanted]
    if not found and wanted == "train":
        found = [file for file in files if splits[file] not in _WORDS]
    if not found:
        known = ", ".join(sorted(set(splits.values())))
        raise DataError(f'has no split "{name}"', where=str(directory), remedy=f"there is {known}; set {WHERE}")
    return found


def split_of(path: Path) -> str | None:
    """The split that a relative path names.

    >>> split_of(Path("data/test-00000-of-00001.parquet")), split_of(Path("dev/rows.jsonl")), split_of(Path("rows.csv"))
    ('test', 'validation', None)
    """
    if shard := _SHARD.match(path.name):
        return _by_word(shard[1]) or shard[1]
    for part in reversed(path.parts):
        if (named := _by_word(part)) is not None:
            return named
    return None


def _by_word(text: str) -> str | None:
    words = re.split(r"[^a-z0-9]+", text.lower())
    return next((split for split, known in _WORDS.items() if any(word in known for word in words)), None)


def part_of(rows: Callable[[], Iterator[Row]], part: Slice | None) -> Iterator[Row]:
    """A part of rows, shares rounded to whole rows; they are read twice where it counts from the end or in per cent."""
    if part is None:
        return rows()
    if all(bound is None or bound.isdigit() for bound in part):
        return itertools.islice(rows(), *(None if bound is None else int(bound) for bound in part))
    total = sum(1 for _ in rows())
    start, stop, _ = slice(*(_row(bound, total) for bound in part)).indices(total)
    return itertools.islice(rows(), start, max(start, stop))


def _row(bound: str | None, total: int) -> Any:
    if bound is None:
        return None
    return round(int(bound[:-1]) * total / 100) if bound.endswith("%") else int(bound)
