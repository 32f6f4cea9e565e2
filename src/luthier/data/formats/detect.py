"""Which format a source has: what it says, else what its columns tell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Format
from luthier.data.formats.chat import MESSAGE_COLUMNS, ChatFormat
from luthier.data.formats.instruct import ALIASES, PAIRS, InstructFormat
from luthier.data.formats.prompt import PromptFormat
from luthier.data.formats.random import RandomFormat
from luthier.data.formats.text import TextFormat
from luthier.errors import ConfigError, DataError, UserError
from luthier.hf.render import Tokenizer

FORMATS: dict[str, Callable[[Tokenizer, SourceConfig], Format]] = {
    "text": TextFormat,
    "instruct": InstructFormat,
    "chat": ChatFormat,
    "random": RandomFormat,
    "prompt": PromptFormat,
}
_OPTIONS = {"text": ("rows",), "instruct": ("rows", "template"), "chat": ("rows",), "prompt": ("rows",)}
"""Options of the formats that do not look after their own; `rows` says what a row of a text file is."""
_WORKS = (
    "text (a column text), chat (messages or conversations), instruct (instruction and output, or prompt and "
    "completion), or name the columns with data.*.column or data.*.columns"
)


def detect(columns: Collection[str], source: SourceConfig) -> str:
    """The name of the format that these columns have.

    Raises:
        DataError: none fits, or more than one does; names the columns.
    """
    if source.columns:
        return "instruct"
    seen = ", ".join(sorted(columns)) or "none"
    if source.column is not None:
        if source.column in MESSAGE_COLUMNS:
            return "chat"
        if source.column in columns:
            return "text"
        raise DataError(f"there is no column {source.column!r} (columns: {seen})", where=source.path)
    found = []
    if any(name in columns for name in MESSAGE_COLUMNS):
        found.append("chat")
    if any(set(pair) <= set(columns) for pair in (*PAIRS, *ALIASES)):
        found.append("instruct")
    if "text" in columns:
        found.append("text")
    if len(found) == 1:
        return found[0]
    if found:
        remedy = "say which with data.*.format"
        raise DataError(f"the columns ({seen}) fit formats {' and '.join(found)}", where=source.path, remedy=remedy)
    raise DataError(f"no format fits the columns ({seen})", where=source.path, remedy=f"these do: {_WORKS}")


def make_format(name: str, tokenizer: Tokenizer, source: SourceConfig) -> Format:
    """The format of a name: one of `FORMATS`, or package.module:Class.

    Raises:
        UserError: there is no such format, or it refuses the source.
    """
    if name in FORMATS:
        _refuse_unused(name, source)
        return FORMATS[name](tokenizer, source)
    module_name, colon, class_name = name.partition(":")
    if not colon:
        remedy = f"use {', '.join(FORMATS)}, or package.module:Class"
        raise ConfigError(f"there is no format {name!r}", where="data.*.format", remedy=remedy)
    if str(Path.cwd()) not in sys.path:
        # a format beside the config file is found, as it is with `python -m`
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"format {name!r} cannot be imported ({error})", where="data.*.format") from error
    try:
        own: Format = found(tokenizer, source)
    except UserError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"format {name!r} cannot be made ({kind}: {error})", where="data.*.format") from error
    return own


def _refuse_unused(name: str, source: SourceConfig) -> None:
    """A setting that a format would not look at is a mistake of its user's, so it is not passed over."""
    if source.columns and name != "instruct":
        raise ConfigError(f"format {name} has no column map", where="data.*.columns", remedy="use data.*.column")
    if source.column is not None and name not in ("text", "chat", "prompt"):
        raise ConfigError(f"format {name} has not one column", where="data.*.column", remedy="use data.*.columns")
    if name in _OPTIONS:
        unknown = [option for option in source.options if option not in _OPTIONS[name]]
        if unknown:
            known = ", ".join(_OPTIONS[name])
            raise ConfigError(
                f"format {name} has no option {unknown[0]!r}", where="data.*.options", remedy=f"there is {known}"
            )
