"""YAML as nodes that keep their text and place. What a plain scalar means is left to the field it is for.

YAML 1.1, which PyYAML implements, reads `off` as false, `1e-4` as text, `12:30` as 750 and `2024-01-01` as a date. Here
a scalar means what its field's type says, and only a field of any type falls back on YAML 1.2's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from luthier.errors import ConfigError

COMMAND_LINE = "command line"

_NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?")
_LONGEST_NUMBER = 400
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_PREFIX = "tag:yaml.org,2002:"
_TAGS = {_PREFIX + name for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Given(yaml.ScalarNode):
    """A value from the command line, not read yet."""

    def __init__(self, value: str) -> None:
        super().__init__(_PREFIX + "str", value)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would read as something else than text."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # Only double quotes have escapes for the line breaks that YAML would fold.
    style = '"' if set(value) & set("\r\x85\u2028\u2029") else None
    return dumper.represent_scalar(_PREFIX + "str", value, style=style)


_Dumper.add_representer(str, _text)

for _tag, _pattern, _first in (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", re.compile(r"[-+]?\d[\d_]*"), list("-+0123456789")),
    ("float", re.compile(rf"{_NUMBER.pattern}|{_INFINITY.pattern}|\.(nan|NaN|NAN)"), list("-+.0123456789")),
):
    _whole = re.compile(f"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(_PREFIX + _tag, _whole, _first)
    _Dumper.add_implicit_resolver(_PREFIX + _tag, _whole, _first)


def compose(text: str, origin: str) -> yaml.Node | None:
    """Parse one YAML document; None when it is empty.

    Raises:
        ConfigError: for a syntax error, a key given twice, a tag or an alias within itself; names the line.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            _check(node, origin, ())
    except RecursionError:
        raise ConfigError("is nested too deeply to be read", where=origin) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if mark else origin
        problem = error.problem or error.context or "syntax error"
        if "'\\t'" in problem:
            raise ConfigError("a tab cannot indent YAML", where=where, remedy="use spaces") from None
        raise ConfigError(f"is not YAML: {problem}", where=where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"is not YAML: the character #x{error.character:04x} is not allowed", where=f"{origin}:{line}"
        ) from None
    return node


def compose_flow(text: str) -> yaml.Node:
    """Parse a command-line value written as YAML flow (`[a, b]`, `{key: value}`)."""
    node = compose(text, COMMAND_LINE)
    if node is None:
        raise ConfigError("is empty", where=COMMAND_LINE)
    for child in _descendants(node):
        child.start_mark = None
    return node


def dump(value: Any) -> str:
    """Plain data as YAML that `compose` reads back to the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def place(node: yaml.Node, origin: str) -> tuple[str, int]:
    """Where a node stands: file and line, or the command line and 0."""
    return (origin, node.start_mark.line + 1) if node.start_mark else (COMMAND_LINE, 0)


def is_null(node: yaml.Node | None) -> bool:
    return node is None or node.tag == _PREFIX + "null"


def number(text: str) -> int | float | None:
    """The number that a text is, whole ones as int (1_000, 1e3); None when it is not one."""
    if match := _INFINITY.fullmatch(text):
        return float(f"{match[1]}inf")
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    if re.fullmatch(r"[-+]?[\d_]+", text):
        return int(text.replace("_", ""))
    value = float(text.replace("_", ""))
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def boolean(text: str) -> bool | None:
    """True for true, yes, on; False for false, no, off; else None."""
    return _BOOLEANS.get(text.lower())


def plain(node: yaml.Node) -> Any:
    """A node as plain data by YAML 1.2's rules, for fields of any type."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    kind = node.tag.removeprefix(_PREFIX)
    if kind == "null":
        return None
    if kind == "bool" and (truth := boolean(node.value)) is not None:
        return truth
    if kind == "int" and (value := number(node.value)) is not None:
        return value
    if kind == "float":
        if node.value.lower() == ".nan":
            return float("nan")
        if (value := number(node.value)) is not None:
            return float(value)
    return str(node.value)


def plain_scalar(text: str) -> yaml.ScalarNode:
    """A text from the command line as YAML would read it, were it written plainly in a file."""
    tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
    return yaml.ScalarNode(tag, text)


def _check(node: yaml.Node, origin: str, above: tuple[int, ...]) -> None:
    where = f"{origin}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise ConfigError("an alias stands within what it is an alias of", where=where)
    if node.tag not in _TAGS:
        raise ConfigError(f"the tag {node.tag.replace(_PREFIX, '!!')} is not known here", where=where)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key must be plain text", where=f"{origin}:{line}")
            if key.value in first:
                raise ConfigError(
                    f'the key "{key.value}" stands here again',
                    where=f"{origin}:{line}",
                    remedy=f"it has a value in line {first[key.value]} already",
                )
            first[key.value] = line
            _check(value, origin, (*above, id(node)))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, origin, (*above, id(node)))


def _descendants(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield from _descendants(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _descendants(item)
