"""Proofs inside the tests' groups of ranks: the reference runs in the test's own process, each model's once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from luthier.hf.debug.shrink import VOCABULARY
from luthier.verify import reference
from luthier.verify.group import Failed, Refused
from luthier.verify.trial import Cell, Trial, documents
from luthier.verify.worker import Worker
from tests.world import RankError, World

LENGTHS = (23, 7, 12, 18)
LAYOUTS = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "pp": 2}]

_worker: Worker | None = None


def on_rank(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of a verifying worker, on every rank of a test's group."""
    global _worker
    if _worker is None:
        _worker = Worker("cpu")
    answer = _worker.answer(name, arguments)
    if "error" in answer:
        raise AssertionError(answer["trace"])
    return answer


class InTests:
    """A group of ranks as `Trial` wants it, made of the tests' own."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self._world.run(on_rank, name, arguments)[0]
        except RankError as error:
            raise Failed(str(error), str(error)) from None
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["answer"]


class Here:
    """The reference in this process."""

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return reference.CALLS[name](**arguments)


class Proofs:
    """Trials by name, each made once."""

    def __init__(self, root: Path, world: Callable[[int], World]) -> None:
        self._root, self._world = root, world
        self._trials: dict[str, Trial] = {}

    def cell(
        self, name: str, config: PreTrainedConfig, parallel: dict[str, int], *, lora: bool, steps: int = 1
    ) -> Cell:
        """What a layout makes of a model.

        Args:
            name: of the model; two of one name are the same.
            config: of a tiny model.
            parallel: degrees.
            lora: adapters beside frozen weights.
            steps: how many.
        """
        here: Any = Here()
        if name not in self._trials:
            directory = Path(tempfile.mkdtemp(dir=self._root))
            config.save_pretrained(directory)
            reference.make(str(directory))
            rows = documents(VOCABULARY, LENGTHS, steps)
            self._trials[name] = Trial({"path": str(directory)}, rows, directory / "files", here)
        ranks = 1
        for degree, number in parallel.items():
            ranks *= number if degree != "ep" else 1
        group: Any = InTests(self._world(ranks))
        return self._trials[name].cell(group, parallel, lora=lora, name=str(parallel))


def right(cell: Cell) -> None:
    """Assert that a cell is right, or show what is not."""
    assert cell.status == "right", f"{cell.layout}: {cell.status}, {cell.reason}\n{cell.trace}"
