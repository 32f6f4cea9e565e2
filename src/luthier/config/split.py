"""How a split is written: its name, or a part of it ("train[:10%]")."""

from __future__ import annotations

import re

from luthier.errors import ConfigError

_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")

Slice = tuple[str | None, str | None]
"""First row and the row after the last, as they were written."""


def parse_split(text: str, where: str = "data.*.split") -> tuple[str, Slice | None]:
    """The name of a split, and which part of it is meant.

    Raises:
        ConfigError: it is not written so.

    >>> parse_split("train"), parse_split("test[10%:]")
    (('train', None), ('test', ('10%', None)))
    """
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise ConfigError(f'"{text}" is no split', where=where, remedy="write train, train[:10%] or train[100:200]")
    return match["name"], (match["start"], match["stop"]) if "[" in text else None
