"""JSON and JSON lines, read verbatim: integers of any size, and no key that a row does not have itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.data.report import BadRow
from luthier.data.sources.lines import lines, not_utf8, whole_text
from luthier.data.sources.origin import Origin
from luthier.errors import DataError

_BLANK = re.compile(r"[ \t\r\n]*")


class _DoubledKeyError(ValueError):
    """An object that names a key twice: whichever value were taken, the other would be lost in silence."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DoubledKeyError(f"key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return made


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python reads no more than 4,300 digits unless it is told to
        allowed = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return int(text)
        finally:
            sys.set_int_max_str_digits(allowed)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


def read_jsonl(path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """A row a line; blank lines are none. A line that is no JSON object comes as a BadRow."""
    for number, line in lines(path):
        origin = Origin(str(path), number)
        if isinstance(line, BadRow):
            yield line, origin
        elif line.strip():
            yield _parse(line), origin


def _parse(line: str) -> dict[str, Any] | BadRow:
    try:
        return _checked(json_value(line))
    except BadRow as fault:
        return fault


def json_value(text: str) -> Any:
    """What a JSON text says: a line of a file, or a text in a column.

    Raises:
        BadRow: it is not JSON, names a key twice or is nested too deeply.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"is not JSON: {_reason(error)} at column {error.colno}", reason="not JSON") from error
    except _DoubledKeyError as error:
        raise BadRow(str(error), reason="a key that stands there twice") from error
    except RecursionError as error:
        raise BadRow("is nested too deeply to be read", reason="not JSON") from error
    except ValueError as error:
        raise BadRow(f"is not JSON that can be read: {error}", reason="not JSON") from error


def read_json(path: Path) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """A list of objects, or objects one after the other.

    Raises:
        DataError: the file is not JSON; names the line.
    """
    text = whole_text(path)
    place, line, counted = _skip(text, 0), 1, 0
    in_list = text[place : place + 1] == "["
    if in_list:
        place = _skip(text, place + 1)
    number = 0
    while place < len(text) and not (in_list and text[place] == "]"):
        if in_list and number:
            if text[place] != ",":
                raise _broken(path, text, place, "a comma or ] is missing")
            place = _skip(text, place + 1)
        line += text.count("\n", counted, place)
        counted = place
        try:
            try:
                value, end = _DECODER.raw_decode(text, place)
            except _DoubledKeyError as error:
                # the place of the key is not known, but the object is JSON otherwise, so the next one can be found
                fault = BadRow(str(error), reason="a key that stands there twice")
                value, end = fault, json.JSONDecoder(parse_int=_integer).raw_decode(text, place)[1]
        except json.JSONDecodeError as error:
            raise _broken(path, text, error.pos, _reason(error)) from error
        except RecursionError as error:
            raise _broken(path, text, place, "nested too deeply to be read") from error
        number += 1
        bad = not_utf8(text[place:end])
        yield bad or _checked(value), Origin(str(path), number, "row") if in_list else Origin(str(path), line)
        place = _skip(text, end)
    if in_list:
        if place >= len(text):
            raise _broken(path, text, place, "the list is not closed")
        rest = _skip(text, place + 1)
        if rest < len(text):
            raise _broken(path, text, rest, "something follows the list")


def _checked(value: Any) -> dict[str, Any] | BadRow:
    if isinstance(value, dict | BadRow):
        return value
    kind = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
    return BadRow(f"is {kind}, where an object with columns belongs", reason="not an object")


def _skip(text: str, place: int) -> int:
    blank = _BLANK.match(text, place)
    return blank.end() if blank else place


def _broken(path: Path, text: str, place: int, reason: str) -> DataError:
    line = text.count("\n", 0, place) + 1
    return DataError(f"is not JSON: {reason}", where=f"{path}:{line}")


def _reason(error: json.JSONDecodeError) -> str:
    return (error.msg[:1].lower() + error.msg[1:]).removesuffix(" at")
