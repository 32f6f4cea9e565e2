"""From a YAML file and `key.path=value` overrides to a RunConfig, and back to YAML.

A relative path in the YAML starts at the working directory, not at the file; a leading `~` is the home directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
import yaml

from luthier.config.faults import Fault, describe, raise_all, shown
from luthier.config.nodes import COMMAND_LINE, Given, compose, dump
from luthier.config.overrides import placed
from luthier.config.read import Reader
from luthier.config.run import RunConfig
from luthier.config.shape import known_paths, public_path, shape_of
from luthier.config.suggest import nearest_key
from luthier.errors import ConfigError

RUN = shape_of(RunConfig)

_SHORTCUTS = {
    "model": ("model",),
    "data": ("data", "train"),
    "validation": ("data", "validation"),
    "output": ("output",),
}
_MAPPING = "tag:yaml.org,2002:map"


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    output: str | Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read a run's YAML, lay the overrides over it and check everything.

    Args:
        path: the YAML file; None when everything is given otherwise.
        overrides: `key.path=value`; the value is read as the field's own type, so that the text of a text field is
            taken exactly as it stands. `null` empties an optional field that does not hold text; lists, mappings and
            sections are written `[a, b]` and `{key: value}`.
        model: the model, instead of the file's.
        data: the path of the training rows, instead of the file's sources.
        validation: the path of the rows to measure on, instead of the file's sources.
        output: the run directory, instead of the file's.
        defaults: values of top-level keys that neither file nor overrides give, for commands that need less than a run.

    Raises:
        ConfigError: all that is wrong, a sentence for each.
    """
    origin = str(path) if path is not None else COMMAND_LINE
    root: yaml.Node = yaml.MappingNode(_MAPPING, [])
    if path is not None:
        root = _file_node(Path(path))
    errors: list[ConfigError] = []
    for name, given in (
        ("model", model),
        ("data", data),
        ("validation", validation),
        ("output", output),
    ):
        if given is not None:
            value: yaml.Node = Given(str(given))
            if name in ("data", "validation"):
                value = yaml.MappingNode(_MAPPING, [(yaml.ScalarNode("tag:yaml.org,2002:str", "path"), value)])
            root = placed(root, RUN, _SHORTCUTS[name], value)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or "" in key.split("."):
            errors.append(
                ConfigError(f"{shown(override)} is not an override", where=COMMAND_LINE, remedy="write key.path=value")
            )
            continue
        try:
            root = placed(root, RUN, tuple(key.split(".")), Given(text))
        except ConfigError as error:
            errors.append(error)

    reader = Reader(origin)
    raw = reader.read(root, RUN, ())
    faults = list(reader.faults)
    config = None
    try:
        config = RunConfig.model_validate({**(defaults or {}), **raw})
    except pydantic.ValidationError as error:
        seen = {fault.path for fault in faults}
        for detail in error.errors(include_url=False):
            fault = describe(detail, public_path(detail["loc"], RUN))
            if fault.path not in seen:
                faults.append(fault)
    located = sorted(((reader.place(fault.path), fault) for fault in faults), key=lambda pair: pair[0][1] or 10**9)
    raise_all([*errors, *(fault.at(*where) for where, fault in located)])
    assert config is not None
    return config


def check_config(data: Mapping[str, Any]) -> tuple[RunConfig | None, list[Fault]]:
    """A run from plain data that a program has made, and all that is wrong with it (then there is no run)."""
    try:
        return RunConfig.model_validate(data), []
    except pydantic.ValidationError as error:
        return None, faults_of(error)


def faults_of(error: pydantic.ValidationError, model: type[RunConfig] = RunConfig) -> list[Fault]:
    """What pydantic found wrong with plain data, in the words of someone who writes YAML."""
    shape = shape_of(model)
    found = []
    for detail in error.errors(include_url=False):
        fault = describe(detail, public_path(detail["loc"], shape))
        if detail["type"] == "extra_forbidden":
            section = [part for part in fault.path[:-1] if not part.isdigit()]
            meant = nearest_key(section, fault.path[-1], known_paths(shape))
            fault = replace(fault, remedy=f"did you mean {meant}?" if meant else None)
        found.append(fault)
    return found


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, every default spelled out, that loads again to an equal config."""
    return dump(config.model_dump(mode="json"))


def _file_node(path: Path) -> yaml.MappingNode:
    where = str(path)
    if path.is_dir():
        remedy = f"did you mean {path / 'config.yaml'}?" if (path / "config.yaml").is_file() else "name a YAML file"
        raise ConfigError("is a directory", where=where, remedy=remedy)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        override = "an override is written key.path=value" if "=" in where else None
        raise ConfigError("there is no such file", where=where, remedy=override) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text", where=f"{where}:{line}", remedy="save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where) from None
    node = compose(text, where)
    if node is None:
        raise ConfigError("is empty", where=where, remedy="it needs at least `model: ...` and `data: ...`")
    if not isinstance(node, yaml.MappingNode):
        what = "is a list" if isinstance(node, yaml.SequenceNode) else "is a bare text"
        raise ConfigError(what, where=where, remedy="write `key: value` lines, such as `model: ...`")
    return node
