"""Data-set classes of one's own, by name: their source travels with the job.

    @register_dataset("riddles")
    class Riddles:
        def __init__(self, tokenizer, source):  # source.options is yours
            self.tokenizer = tokenizer

        def __call__(self, row):  # one Sample, a list of them, or None for an empty row
            from luthier.batch import Sample

            ids = self.tokenizer(row["riddle"] + row["answer"])["input_ids"]
            return Sample.from_ids(ids, [1.0] * len(ids))

A class must stand on its own, as a training function must: what it imports, it imports inside its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.jobs.source import source_of

_CLASSES: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


def register_dataset(name: str) -> Callable[[Class], Class]:
    """A decorator that gives a class its name for `CustomDataset(name=...)`; given again, it means the newer class."""

    def register(cls: Class) -> Class:
        _CLASSES[name] = cls
        return cls

    return register


def shipped(name: str, where: str) -> tuple[str, str]:
    """The source of the class of a name, and the class's own name.

    Raises:
        ConfigError: no class is registered so, it cannot be called, or its source is not there or does not stand alone.
    """
    if name not in _CLASSES:
        meant = nearest(name, _CLASSES)
        remedy = f'did you mean "{meant}"?' if meant else "register a class with @register_dataset"
        raise ConfigError(f'no data-set class is called "{name}"', where=where, remedy=remedy)
    cls = _CLASSES[name]
    if not any("__call__" in vars(base) for base in cls.__mro__):
        remedy = "give it __call__(self, row), which makes a Sample of a row"
        raise ConfigError(f"{cls.__name__} cannot be called with a row", where=where, remedy=remedy)
    return source_of(cls, where), cls.__name__
