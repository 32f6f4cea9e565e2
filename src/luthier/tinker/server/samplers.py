"""The server's samplers: which weights each has, that the worker has them, and the samples that are under way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from luthier.tinker.server import store as books
from luthier.tinker.server.process import Refused, WorkerLost
from luthier.tinker.server.records import Operation, Sampler

if TYPE_CHECKING:
    from luthier.tinker.server.service import Service

_MOST_DEATHS = 3
"""Workers that may end while a sample grows before it is given up; most of them did so for another's sake."""
IDLE = 8
"""Samplers without a text whose weights the worker keeps: a loop makes one at every step, and names few again."""
_PAUSE = 1.0
"""Seconds after which a sample is tried anew where the books or the disk failed."""


class Samplers:
    """All samplers.

    Args:
        service: whose they are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.records: dict[str, Sampler] = {}
        self._loaded: dict[str, tuple[int, int]] = {}
        """The worker's generation, and how often it had made the model of a live sampler; the last used last."""
        self.used: dict[str, float] = {}
        """When a sample of each ended last, seconds since the epoch; of this server's time alone."""
        self._growing: Counter[str] = Counter()
        """Samples under way of each."""
        self._locks: dict[str, asyncio.Lock] = {}
        """Held while a sampler is loaded or unloaded."""

    def enter(self, sampler: Sampler, loaded: tuple[int, int]) -> None:
        """Let a sampler be there that the worker has got already, and the books too."""
        self.records[sampler.id] = sampler
        self._loaded[sampler.id] = loaded
        self._free()

    async def create(self, sampler: Sampler) -> None:
        """Enter a new sampler in the books."""
        self.records[sampler.id] = sampler
        await self._service.store.run(lambda connection: books.replace(connection, sampler))

    async def run(self, operation: Operation) -> None:
        """Have a sample made."""
        while operation.status == "waiting":
            try:
                await self._try(operation)
            except (SQLAlchemyError, OSError) as error:
                self._service.metrics.crashed(error)
                await asyncio.sleep(_PAUSE)

    async def _try(self, operation: Operation) -> None:
        service = self._service
        payload = await service.payload(operation)
        while operation.status == "waiting":
            sampler = self.records.get(operation.line)
            if sampler is None:
                await service.fail(operation, "its sampler was removed", "user")
                return
            try:
                generation = await self._ready(sampler)
                if operation.status != "waiting":  # it was given up meanwhile
                    return
                name = None if generation is None else sampler.id
                head = {"command": "sample", "sampler": name, "seed": operation.details["seed"]}
                answer, content = await self._grow(sampler, operation.id, head, payload, generation)
            except Refused as refusal:
                await service.fail(operation, str(refusal), "user")
            except WorkerLost as lost:
                operation.deaths += lost.guilty
                if operation.deaths >= _MOST_DEATHS:
                    await service.fail(operation, "the worker died while this grew; see the server's log", "server")
            else:
                service.metrics.sampled(answer["tokens"])
                await service.finish(operation, content, answer["media"])

    async def _grow(
        self, sampler: Sampler, number: str, head: dict[str, Any], payload: bytes, generation: int | None
    ) -> tuple[dict[str, Any], bytes]:
        self._growing[sampler.id] += 1
        try:
            return await self._service.worker.call(number, head, payload, generation=generation)
        finally:
            self.used[sampler.id] = time.time()
            self._growing[sampler.id] -= 1
            self._growing += Counter()  # without those that are at 0

    def is_idle(self, sampler_id: str) -> bool:
        """Whether no text grows on it."""
        return not self._growing[sampler_id]

    def _free(self) -> None:
        """Let the worker forget weights that were not sampled from for longest."""
        idle = [name for name in self._loaded if self.is_idle(name)]
        for name in idle[:-IDLE]:
            self._service.begin(self.unload(name))

    async def unload(self, sampler_id: str) -> None:
        """Free what the worker keeps of a sampler; it is brought back when it is needed."""
        async with self._lock(sampler_id):
            if self._loaded.pop(sampler_id, None) is not None:
                self._service.worker.tell({"command": "drop_sampler", "sampler": sampler_id})

    async def remove(self, sampler_id: str) -> None:
        """Let a sampler be gone; samples that grow on it end as they would, and those that wait fail."""
        sampler = self.records.pop(sampler_id, None)
        if sampler is None:
            return
        await self.unload(sampler_id)
        self._locks.pop(sampler_id, None)
        self.used.pop(sampler_id, None)
        await self._service.store.run(lambda connection: books.delete(connection, sampler))
        if sampler.directory is not None and sampler.model_path is None:
            await asyncio.to_thread(self._service.files.remove, Path(sampler.directory))

    def _lock(self, sampler_id: str) -> asyncio.Lock:
        return self._locks.setdefault(sampler_id, asyncio.Lock())

    async def _ready(self, sampler: Sampler) -> int | None:
        """Let the worker have a sampler's weights.

        Returns:
            the generation of the worker that has them; None for the base, which all have.
        """
        service = self._service
        if sampler.directory is None and sampler.model_id is None:
            return None
        line = service.lines[sampler.model_id] if sampler.model_id is not None else None
        async with self._lock(sampler.id):
            if line is None:
                return await self._load(sampler, await service.worker.here(), 0)
            async with line.lock:
                return await self._load(sampler, await line.load(), line.loads)

    async def _load(self, sampler: Sampler, generation: int, loads: int) -> int:
        if self._loaded.get(sampler.id) == (generation, loads):
            self._loaded[sampler.id] = self._loaded.pop(sampler.id)
            return generation
        head = {
            "command": "load_sampler",
            "sampler": sampler.id,
            "model": sampler.model_id,
            "directory": sampler.directory,
        }
        await self._service.worker.call(f"{sampler.id}:load", head, generation=generation)
        self._loaded.pop(sampler.id, None)
        self._loaded[sampler.id] = (generation, loads)
        self._free()
        return generation
