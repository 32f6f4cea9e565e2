"""The reference of all config fields, written from the models: `python -m luthier.config.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from luthier.config.run import RunConfig
from luthier.config.shape import TAGS, Shape, shape_of

_HEAD = """# Every key of a run

Written by `python -m luthier.config.reference > docs/config.md`; a test keeps it up to date.

A run is a YAML file, `key.path=value` overrides on the command line, or both. An override is read as the field's own
type: the text of a text field is taken exactly as it stands, `null` empties an optional field of another type, lists
and sections are written `[a, b]` and `{key: value}`. Where a list holds one source, `data.train.path` means
`data.train.0.path`. Relative paths start at the working directory, not at the YAML file; a leading `~` is the home
directory. Everything but `model` and `data` has a default. Unknown keys are errors.
"""

_WORDS = {
    "text": "text",
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "anything": "anything",
}


def reference() -> str:
    """The reference as Markdown."""
    return _HEAD + "".join(_section("", shape_of(RunConfig)))


def _section(path: str, shape: Shape) -> Iterator[str]:
    for model in shape.sections:
        title = path or "top level"
        if len(shape.sections) > 1:
            title += f" ({shape.tag}: {' or '.join(shape.tags(model))})"
        yield f"\n## {title}\n\n"
        if model.__doc__ and model.__doc__ is not BaseModel.__doc__ and "__doc__" in vars(model):
            yield f"{' '.join(inspect.cleandoc(model.__doc__).split())}\n\n"
        yield "| key | takes | default | |\n| --- | --- | --- | --- |\n"
        for key, field in model.model_fields.items():
            yield f"| `{key}` | {_takes(shape_of(field.annotation))} | {_default(field)} | {_text(field)} |\n"
    for key, child in _children(shape):
        yield from _section(f"{path}.{key}" if path else key, child)


def _children(shape: Shape) -> Iterator[tuple[str, Shape]]:
    sections: dict[str, Shape] = {}
    for model in shape.sections:
        for key, field in model.model_fields.items():
            child = shape_of(field.annotation)
            child = child.items[0] if child.kind == "list" else child
            known = [other.sections for other in sections.values()]
            if child.kind == "section" and child.sections not in known:
                sections[key] = child
    yield from sections.items()


def _takes(shape: Shape) -> str:
    match shape.kind:
        case "section":
            words = "section"
        case "list" if len(shape.items) > 1:
            words = f"[{', '.join(_takes(item) for item in shape.items)}]"
        case "list":
            words = f"list of {_takes(shape.items[0])}"
        case "mapping":
            words = f"mapping to {_takes(shape.items[0])}"
        case "choice":
            words = ", ".join(f"`{choice}`" for choice in shape.choices)
        case kind:
            words = _WORDS[kind]
    return f"{words}, or null" if shape.optional and shape.kind != "anything" else words


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        tag = next((key for key in TAGS if getattr(value, key, None)), None)
        return f"`{{{tag}: {getattr(value, tag)}}}`" if tag else "its own defaults"
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, bool) or value is None:
        value = {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        value = f"[{', '.join(str(item) for item in value)}]"
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
