"""Which format a source has: what it says, else what its columns tell."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from luthier.config.kinds import Kind
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Format
from luthier.data.formats.chat import MESSAGE_COLUMNS, ChatFormat
from luthier.data.formats.instruct import ALIASES, PAIRS, InstructFormat
from luthier.data.formats.preference import LISTS, PROMPTS, PreferenceFormat, RankedFormat
from luthier.data.formats.random import RandomFormat
from luthier.data.formats.text import TextFormat
from luthier.data.formats.unpaired import PromptFormat, UnpairedFormat
from luthier.errors import ConfigError, DataError
from luthier.hf.render import Tokenizer
from luthier.own_code import kind_and_words, module_of, own_code

FORMATS: dict[str, Callable[[Tokenizer, SourceConfig], Format]] = {
    "text": TextFormat,
    "instruct": InstructFormat,
    "chat": ChatFormat,
    "random": RandomFormat,
    "preference": PreferenceFormat,
    "ranked": RankedFormat,
    "unpaired": UnpairedFormat,
    "prompt": PromptFormat,
}
_OPTIONS = {
    "text": ("rows", "eos"),
    "instruct": ("rows", "template"),
    "chat": ("rows",),
    "preference": ("rows", "template"),
    "ranked": ("rows", "template", "pairs"),
    "unpaired": ("rows", "template"),
    "prompt": ("rows", "template"),
}
"""Options of the formats that do not look after their own; `rows` says what a row of a text file is."""
_WORKS = (
    "text (a column text), chat (messages or conversations), instruct (instruction and output, or prompt and "
    "completion), or name the columns with data.*.column or data.*.columns"
)
_WORKS_FOR: dict[Kind, str] = {
    "pairs": "preference (chosen and rejected), ranked (prompt, completions and scores)",
    "labelled": "unpaired (prompt, completion and label, or chosen and rejected)",
    "prompts": "prompt (a column prompt or messages)",
}
_METHODS: dict[Kind, str] = {
    "documents": "sft",
    "pairs": "dpo, orpo or simpo",
    "labelled": "kto",
    "prompts": "grpo",
}


def kind_of_format(made: Format) -> Kind:
    """What the rows of a format are."""
    found: Kind = getattr(made, "kind", "documents")
    return found


def detect(columns: Collection[str], source: SourceConfig, kind: Kind = "documents") -> str:
    """The name of the format that these columns have.

    Args:
        columns: of the first rows.
        source: the source.
        kind: what the rows have to be.

    Raises:
        DataError: none fits, or more than one does; names the columns.
    """
    if kind != "documents":
        return _detect_answers(columns, source, kind)
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
    works = f"these do: {_WORKS}"
    if {"chosen", "rejected"} <= set(columns):
        works = "pairs of answers train by method: dpo (or orpo, simpo, kto)"
    raise DataError(f"no format fits the columns ({seen})", where=source.path, remedy=works)


def _detect_answers(columns: Collection[str], source: SourceConfig, kind: Kind) -> str:
    """The same for rows that are no documents: the kind leaves little to tell."""
    has = {source.columns.get(name, name) for name in ("chosen", "rejected")} <= set(columns)
    match kind:
        case "pairs" if has:
            return "preference"
        case "pairs" if source.columns.get("completions", "") in columns or any(name in columns for name in LISTS):
            return "ranked"
        case "labelled" if has or source.columns.get("completion", "completion") in columns:
            return "unpaired"
        case "prompts" if source.columns or any(name in columns for name in (*PROMPTS, *MESSAGE_COLUMNS)):
            return "prompt"
    seen = ", ".join(sorted(columns)) or "none"
    raise DataError(
        f"no format for {kind} fits the columns ({seen})", where=source.path, remedy=f"these do: {_WORKS_FOR[kind]}"
    )


def make_format(name: str, tokenizer: Tokenizer, source: SourceConfig, kind: Kind = "documents") -> Format:
    """The format of a name: one of `FORMATS`, or package.module:Class, whose rows are what the method needs.

    Raises:
        UserError: there is no such format, or it refuses the source.
    """
    if name in FORMATS:
        _refuse_unused(name, source)
        return _of_kind(FORMATS[name](tokenizer, source), name, kind)
    place, colon, class_name = name.rpartition(":")
    if not colon or not place or not class_name:
        remedy = f"use {', '.join(FORMATS)}, or package.module:Class"
        raise ConfigError(f"there is no format {name!r}", where="data.*.format", remedy=remedy)
    with own_code(partial(_unusable, f"format {name!r} cannot be imported")):
        found = getattr(module_of(place), class_name)
    with own_code(partial(_unusable, f"format {name!r} cannot be made")):
        own: Format = found(tokenizer, source)
    return _of_kind(own, name, kind)


def _unusable(what: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{what} ({kind_and_words(error)})", where="data.*.format")


def _of_kind(made: Format, name: str, kind: Kind) -> Format:
    own = kind_of_format(made)
    if own != kind:
        raise ConfigError(
            f"format {name} gives {own}, and the method of this run trains on {kind}",
            where="method",
            remedy=f"{own} are for {_METHODS[own]}",
        )
    return made


def _refuse_unused(name: str, source: SourceConfig) -> None:
    """A setting that a format would not look at is a mistake of its user's, so it is not passed over."""
    if source.columns and name in ("text", "chat", "random"):
        raise ConfigError(f"format {name} has no column map", where="data.*.columns", remedy="use data.*.column")
    if source.column is not None and name not in ("text", "chat"):
        raise ConfigError(f"format {name} has not one column", where="data.*.column", remedy="use data.*.columns")
    if name in _OPTIONS:
        unknown = [option for option in source.options if option not in _OPTIONS[name]]
        if unknown:
            known = ", ".join(_OPTIONS[name])
            raise ConfigError(
                f"format {name} has no option {unknown[0]!r}", where="data.*.options", remedy=f"there is {known}"
            )
