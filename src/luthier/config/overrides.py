"""Where in the YAML a `key.path=value` of the command line goes."""

from __future__ import annotations

import yaml

from luthier.config.nodes import COMMAND_LINE, Given, compose_flow, is_null
from luthier.config.shape import ANYTHING, Shape
from luthier.errors import ConfigError

_PREFIX = "tag:yaml.org,2002:"


def placed(
    node: yaml.Node | None, shape: Shape, keys: tuple[str, ...], given: yaml.Node, path: tuple[str, ...] = ()
) -> yaml.Node:
    """The node with a value put in at `keys`, sections on the way made where they are missing.

    Args:
        node: what stands there so far.
        shape: what the field takes.
        keys: the way from the node to the value.
        given: the value, which is read later, when all overrides are in.
        path: the way to the node, for messages.

    Raises:
        ConfigError: when the keys lead into a single value or to an item that a list does not have.
    """
    if not keys:
        return given
    if isinstance(node, Given) and node.value[:1] in ("[", "{") and shape.kind != "text":
        node = compose_flow(node.value)
    if is_null(node):
        node = None
    if shape.kind == "list":
        return _in_list(node, shape, keys, given, path)
    if shape.kind == "mapping":
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        return _with_key(entries, ".".join(keys), given, node)
    if shape.kind not in ("section", "anything"):
        raise ConfigError(
            "holds one value and has no keys of its own", where=f"{COMMAND_LINE}: {'.'.join((*path, *keys))}"
        )
    key, rest = keys[0], keys[1:]
    entries = _entries(node, shape)
    child = shape.child(key) if shape.kind == "section" else ANYTHING
    old = next((value for name, value in entries if name.value == key), None)
    return _with_key(entries, key, placed(old, child, rest, given, (*path, key)), node)


def _in_list(
    node: yaml.Node | None, shape: Shape, keys: tuple[str, ...], given: yaml.Node, path: tuple[str, ...]
) -> yaml.Node:
    items = list(node.value) if isinstance(node, yaml.SequenceNode) else [] if node is None else [node]
    where = f"{COMMAND_LINE}: {'.'.join((*path, *keys))}"
    if keys[0].isdecimal():
        index, rest = int(keys[0]), keys[1:]
        if index > len(items):
            raise ConfigError(f"there are {len(items)} items, counted from 0", where=where)
    elif len(items) > 1:
        raise ConfigError(
            f"there are {len(items)} items", where=where, remedy=f"say which, as {'.'.join((*path, '0', *keys))}"
        )
    else:
        index, rest = 0, keys
    old = items[index] if index < len(items) else None
    items[index : index + 1] = [placed(old, shape.item(index), rest, given, (*path, str(index)))]
    return yaml.SequenceNode(_PREFIX + "seq", items, start_mark=node.start_mark if node is not None else None)


def _entries(node: yaml.Node | None, shape: Shape) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    if node is None:
        return []
    if isinstance(node, yaml.MappingNode):
        return node.value
    shorthand = shape.shorthand
    return [(yaml.ScalarNode(_PREFIX + "str", shorthand), node)] if shorthand else []


def _with_key(
    entries: list[tuple[yaml.ScalarNode, yaml.Node]], key: str, value: yaml.Node, node: yaml.Node | None
) -> yaml.MappingNode:
    kept = [(name, old) for name, old in entries if name.value != key]
    mark = node.start_mark if node is not None else None
    return yaml.MappingNode(_PREFIX + "map", [*kept, (yaml.ScalarNode(_PREFIX + "str", key), value)], start_mark=mark)
