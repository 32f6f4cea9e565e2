"""Engines: what trains by a job's config. One is a class under a name; jobs name it, nodes start it.

    @register_engine("mine")
    class Mine:
        def check(self, config): ...
        def command(self, config): return [sys.executable, "-m", "mine", str(config)]

Nodes run in processes of their own, where only Luthier's engines are known by a bare name. One from elsewhere is named
with the module that registers it: `engine="my_package.engines:mine"`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from luthier.errors import ConfigError


class Engine(Protocol):
    """Reads a Luthier run and trains it."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse a run that this engine cannot do, before anything starts. Imports no torch.

        Args:
            config: the run as plain data.

        Raises:
            ConfigError: all that is wrong, a sentence for each.
        """

    def command(self, config: Path) -> list[str]:
        """What each node runs; `PET_*` variables tell it how many processes to start and where nodes meet.

        Args:
            config: a YAML file with the run.
        """


Kind = TypeVar("Kind", bound=type[Engine])

_ENGINES: dict[str, type[Engine]] = {}
_BUILT_IN = {"luthier": "luthier.jobs.engines.luthier", "huggingface": "luthier.jobs.engines.huggingface"}
"""Names of those that come along -> their modules, imported when they are asked for."""


def register_engine(name: str) -> Callable[[Kind], Kind]:
    """Make a class known as the engine of that name."""

    def register(engine: Kind) -> Kind:
        _ENGINES[name] = engine
        return engine

    return register


def engine(name: str) -> Engine:
    """The engine of that name, or of "module:name".

    Raises:
        ConfigError: there is none.
    """
    module, _, short = name.rpartition(":")
    module = module or _BUILT_IN.get(short, "")
    if module and (":" in name or short not in _ENGINES):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(f"there is no module {error.name}", where="engine", remedy="check its name") from None
    kind = _ENGINES.get(short)
    if kind is not None and ":" in name and kind.__module__ == _BUILT_IN.get(short) != module:
        kind = None  # one of ours, and not the other module's that is meant
    if kind is None:
        known = ", ".join(engines())
        raise ConfigError(
            f'there is no engine "{name}"', where="engine", remedy=f"use one of {known}, or name one as module:name"
        )
    return kind()


def engines() -> list[str]:
    """Names of all engines that are known."""
    return sorted({*_BUILT_IN, *_ENGINES})
