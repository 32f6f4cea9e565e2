"""What a field takes, read off the pydantic models: the one authority for how text becomes a value."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

TAGS = ("name", "kind")
"""The keys that tell the variants of a section apart (`optimizer.name`, `adapter.kind`)."""

Kind = Literal["section", "list", "mapping", "text", "choice", "boolean", "integer", "number", "anything"]

_SCALARS: dict[Any, Kind] = {
    str: "text",
    Path: "text",
    bool: "boolean",
    int: "integer",
    float: "number",
    Any: "anything",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a field takes.

    Attributes:
        kind: how its value is written.
        optional: whether `null` is one of its values.
        sections: of a section, its models; several are variants told apart by the key `tag`.
        items: of a list, what it holds (of a tuple, place by place); of a mapping, what its values are.
        choices: of a choice, the words there are.
    """

    kind: Kind
    optional: bool = False
    sections: tuple[type[BaseModel], ...] = ()
    items: tuple[Shape, ...] = ()
    choices: tuple[str, ...] = ()

    def item(self, index: int) -> Shape:
        """The shape of item `index` of a list or tuple."""
        return self.items[min(index, len(self.items) - 1)]

    def variant(self, tag: str | None) -> type[BaseModel] | None:
        """The model of a section: the only one, the one of that name, or without a name the default one."""
        if len(self.sections) == 1:
            return self.sections[0]
        for model in self.sections:
            field = model.model_fields[self.tag]
            if tag in get_args(field.annotation) or (tag is None and not field.is_required()):
                return model
        return None

    @property
    def tag(self) -> str:
        """The key that tells the variants apart."""
        return next(key for key in TAGS if all(key in model.model_fields for model in self.sections))

    @property
    def shorthand(self) -> str | None:
        """The key of a section that a bare text or list stands for; None where it cannot stand for one."""
        model = self.variant(None) if self.kind == "section" else None
        return getattr(model, "shorthand", None)

    def tags(self, model: type[BaseModel]) -> tuple[str, ...]:
        """The names under which a variant goes."""
        return get_args(model.model_fields[self.tag].annotation)

    def child(self, key: str, model: type[BaseModel] | None = None) -> Shape:
        """The shape of a section's key; "anything" for a key that no variant has."""
        for section in (model,) if model else self.sections:
            if key in section.model_fields:
                return shape_of(section.model_fields[key].annotation)
        return ANYTHING


ANYTHING = Shape("anything", optional=True)


def shape_of(annotation: Any) -> Shape:
    """Read a type annotation of a config field.

    Raises:
        TypeError: for a type that no config field has had yet.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shape_of(arguments[0])
    if origin is Union or origin is types.UnionType:
        members = [shape_of(argument) for argument in arguments if argument is not type(None)]
        sections = tuple(section for member in members for section in member.sections)
        if len(members) > 1 and not all(member.kind == "section" for member in members):
            raise TypeError(f"a union of {annotation} cannot be read from text: which member is meant?")
        return replace(members[0], optional=type(None) in arguments, sections=sections)
    if origin is Literal:
        return Shape("choice", choices=arguments)
    if origin is list:
        return Shape("list", items=(shape_of(arguments[0]),))
    if origin is tuple:
        return Shape("list", items=tuple(shape_of(argument) for argument in arguments))
    if origin is dict:
        return Shape("mapping", items=(shape_of(arguments[1]),))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape("section", sections=(annotation,))
    if annotation in _SCALARS:
        return Shape(_SCALARS[annotation])
    raise TypeError(f"a field of type {annotation} cannot be read from text")


def known_paths(shape: Shape, prefix: str = "") -> Iterator[str]:
    """Every key there is, as a full path ("data.train.path"; items of a list go without their number)."""
    for model in shape.sections:
        for key, field in model.model_fields.items():
            path, child = prefix + key, shape_of(field.annotation)
            yield path
            yield from known_paths(child.items[0] if child.kind == "list" else child, path + ".")


def public_path(location: tuple[int | str, ...], shape: Shape) -> tuple[str, ...]:
    """A pydantic error location as a user writes it: without the names of variants that pydantic puts in between."""
    path: list[str] = []
    rest = list(location)
    model: type[BaseModel] | None = None
    while rest:
        if shape.kind == "section" and len(shape.sections) > 1 and model is None:
            model = shape.variant(str(rest.pop(0)))
            continue
        part = rest.pop(0)
        path.append(str(part))
        if shape.kind == "section":
            shape, model = shape.child(str(part), model), None
        elif shape.kind == "list" and isinstance(part, int):
            shape = shape.item(part)
        else:
            shape = ANYTHING
    return tuple(path)
