"""Nodes to plain data, each scalar read as the type of its field."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from luthier.config.faults import Fault, shown
from luthier.config.nodes import Given, boolean, compose_flow, is_null, number, place, plain, plain_scalar
from luthier.config.shape import ANYTHING, Shape, known_paths, shape_of
from luthier.config.suggest import nearest_key
from luthier.errors import ConfigError


class Reader:
    """Reads one config; gathers what is wrong with its keys and remembers where each field stands.

    Values of the wrong type pass through as they are: pydantic, which comes after, names them.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.faults: list[Fault] = []
        self._places: dict[tuple[str, ...], tuple[str, int]] = {}

    def place(self, path: tuple[str, ...]) -> tuple[str, int]:
        """File and line of a field, or of the nearest section around it; line 0 when it has none."""
        for length in range(len(path), 0, -1):
            part = path[:length]
            for candidate in (part, tuple(key for key in part if not key.isdigit())):
                if candidate in self._places:
                    return self._places[candidate]
        return self.origin, 0

    def read(self, node: yaml.Node, shape: Shape, path: tuple[str, ...]) -> Any:
        """Plain data for pydantic."""
        if path:
            self._places[path] = place(node, self.origin)
        if isinstance(node, Given):
            return self._given(node, shape, path)
        if is_null(node) and shape.kind != "section":
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, shape, path)
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, shape, path)
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, shape, path)

    def _given(self, node: Given, shape: Shape, path: tuple[str, ...]) -> Any:
        text = node.value
        if shape.kind == "text":
            return text
        if text == "null" and shape.optional:
            return None
        if shape.kind in ("section", "list", "mapping", "anything") and text[:1] in ("[", "{"):
            try:
                return self.read(compose_flow(text), shape, path)
            except ConfigError as error:
                self.faults.append(Fault(path, f"{shown(text)} {error.what}"))
                return None
        if shape.kind in ("section", "list"):
            return self._scalar(yaml.ScalarNode("tag:yaml.org,2002:str", text), shape, path)
        return self.read(plain_scalar(text), shape, path)

    def _mapping(self, node: yaml.MappingNode, shape: Shape, path: tuple[str, ...]) -> Any:
        if shape.kind == "list":
            return self._mapping(node, shape.item(0), path)
        if shape.kind == "mapping":
            return {key.value: self.read(value, shape.items[0], (*path, key.value)) for key, value in node.value}
        if shape.kind != "section":
            return {key.value: self.read(value, ANYTHING, (*path, key.value)) for key, value in node.value}
        key_of_tag = shape.tag if len(shape.sections) > 1 else None
        tag = next((value.value for key, value in node.value if key.value == key_of_tag), None)
        model = shape.variant(tag if isinstance(tag, str) else None)
        data: dict[str, Any] = {}
        for key_node, value in node.value:
            key = key_node.value
            if model is None or key in model.model_fields:
                data[key] = self.read(value, shape.child(key, model), (*path, key))
            else:
                where = key_node if not isinstance(value, Given) and value.start_mark else value
                self._places[(*path, key)] = place(where, self.origin)
                self._unknown(path, key, shape, model)
        return data

    def _sequence(self, node: yaml.SequenceNode, shape: Shape, path: tuple[str, ...]) -> Any:
        if shape.kind == "section" and (longer := _long_form(node, shape)) is not None:
            return self._mapping(longer, shape, path)
        item = shape.item if shape.kind == "list" else lambda index: ANYTHING
        return [self.read(child, item(index), (*path, str(index))) for index, child in enumerate(node.value)]

    def _scalar(self, node: yaml.ScalarNode, shape: Shape, path: tuple[str, ...]) -> Any:
        text: str = node.value
        match shape.kind:
            case "text" | "choice":
                return text
            case "boolean":
                truth = boolean(text)
                return text if truth is None else truth
            case "integer" | "number":
                value = number(text)
                return text if value is None else value
            case "list":
                return self._scalar(node, shape.item(0), path)
            case "section":
                longer = _long_form(node, shape) if not is_null(node) else None
                return self._mapping(longer, shape, path) if longer is not None else plain(node)
            case _:
                return plain(node)

    def _unknown(self, section: tuple[str, ...], key: str, shape: Shape, model: type[BaseModel]) -> None:
        path = (*section, key)
        owners = [tag for other in shape.sections if key in other.model_fields for tag in shape.tags(other)]
        if owners:
            remedy = f"it belongs to {' and '.join(owners)}"
            self.faults.append(Fault(path, f"is not a key of {shape.tags(model)[0]}", remedy))
            return
        meant = self._meant(section, key)
        self.faults.append(Fault(path, "is not a known key", f"did you mean {meant}?" if meant else None))

    def _meant(self, section: tuple[str, ...], key: str) -> str | None:
        from luthier.config.run import RunConfig

        named = tuple(part for part in section if not part.isdigit())
        return nearest_key(named, key, known_paths(shape_of(RunConfig)))


def _long_form(node: yaml.Node, shape: Shape) -> yaml.MappingNode | None:
    """A bare text or list that stands for a section, as the mapping that is meant; None where it cannot."""
    shorthand = shape.shorthand
    if shorthand is None or (isinstance(node, yaml.SequenceNode) and shape.child(shorthand).kind == "choice"):
        return None
    key = yaml.ScalarNode("tag:yaml.org,2002:str", shorthand)
    return yaml.MappingNode("tag:yaml.org,2002:map", [(key, node)], start_mark=node.start_mark)
