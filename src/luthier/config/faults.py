"""All that is wrong with a config, each as one sentence with its file, line and field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

from luthier.config.suggest import nearest
from luthier.errors import ConfigError, UserError

_TYPES = {
    "bool": "true or false",
    "date": "a date",
    "dict": "a mapping of keys to values",
    "float": "a number",
    "frozen_set": "a list",
    "int": "a whole number",
    "list": "a list",
    "model": "a section of `key: value` lines",
    "path": "a path",
    "string": "text",
    "tuple": "a list",
}

_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        path: the field at fault, () for the whole file.
        what: what is wrong, as a clause that goes on after the field.
        remedy: what would work.
    """

    path: tuple[str, ...]
    what: str
    remedy: str | None = None

    def at(self, origin: str, line: int) -> ConfigError:
        """The error for this fault, where it stands; line 0 for no line."""
        file = f"{origin}:{line}" if line else origin
        where = f"{file}: {'.'.join(self.path)}" if self.path else file
        return ConfigError(self.what, where=where, remedy=self.remedy)


def shown(value: Any) -> str:
    """A value as a message shows it: text in quotes, long ones cut."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = f'"{value}"' if isinstance(value, str | Path) else str(value)
    return text if len(text) <= 80 else f"{text[:76]}..."


def describe(error: pydantic_core.ErrorDetails, path: tuple[str, ...]) -> Fault:
    """A pydantic error in the words of someone who writes YAML."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return Fault(path, "is missing", _how_to_give(path))
    if kind == "extra_forbidden":
        return Fault(path, "is not a known key")
    if kind == "literal_error":
        return _not_among(path, value, [part.strip().strip("'") for part in _split(context["expected"])])
    if kind == "union_tag_invalid":
        tags = [part.strip().strip("'") for part in context["expected_tags"].split(",")]
        return _not_among((*path, context["discriminator"].strip("'")), context["tag"], tags)
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return Fault(path, f"must be {words} {_limit(context[key])}, not {_limit(value)}")
    if kind == "too_short":
        return Fault(path, f"needs at least {_items(context['min_length'])}, and has {context['actual_length']}")
    if kind == "string_unicode":
        return Fault(path, f"{shown(value)} holds bytes that are not UTF-8", "rename it, or give it as UTF-8")
    if kind == "string_too_short":
        return Fault(path, "is empty")
    if kind == "too_long":
        return Fault(path, f"takes at most {_items(context['max_length'])}, and has {context['actual_length']}")
    if kind == "value_error":
        what, _, remedy = str(context["error"]).partition("; ")
        return Fault(path, what, remedy or None)
    if kind == "finite_number":
        return Fault(path, "must be a finite number")
    expected = next((words for name, words in _TYPES.items() if kind.startswith(f"{name}_")), None)
    if expected is not None:
        return Fault(path, f"{_summary(value)} is not {expected}")
    return Fault(path, f"{_summary(value)} does not fit: {error['msg']}")


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise what is wrong as one error, a sentence a line; nothing when nothing is wrong."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n".join(str(error) for error in errors))


def _not_among(path: tuple[str, ...], value: Any, words: list[str]) -> Fault:
    meant = nearest(value, words) if isinstance(value, str) else None
    one_of = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    return Fault(path, f"{_summary(value)} is not {one_of}", f'did you mean "{meant}"?' if meant else None)


def _split(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").split(", ")


def _summary(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping of keys to values"
    return "a list" if isinstance(value, list | tuple) else shown(value)


def _limit(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def _items(count: int) -> str:
    return "one item" if count == 1 else f"{count} items"


def _how_to_give(path: tuple[str, ...]) -> str | None:
    if path in (("model",), ("data",)):
        return f"give it as `{path[0]}: ...` in the file or as --{path[0]}"
    return None
