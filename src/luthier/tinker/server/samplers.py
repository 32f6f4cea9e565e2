"""The server's samplers: which weights each has, that the worker has them, and the samples that are under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from luthier.tinker.server import store as books
from luthier.tinker.server.line import Line
from luthier.tinker.server.process import Refused, WorkerLost
from luthier.tinker.server.records import Operation, Sampler

if TYPE_CHECKING:
    from luthier.tinker.server.service import Service

_MOST_DEATHS = 3
"""Workers that may end while a sample grows before it is given up; most of them did so for another's sake."""


class Samplers:
    """All samplers.

    Args:
        service: whose they are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.records: dict[str, Sampler] = {}
        self._loaded: dict[str, tuple[int, int]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def enter(self, sampler: Sampler, loaded: Line | None = None) -> None:
        """Let a sampler be there.

        Args:
            loaded: the line in whose turn the worker has got it already.
        """
        self.records[sampler.id] = sampler
        if loaded is not None:
            live = loaded.loads if sampler.model_id is not None else 0
            self._loaded[sampler.id] = (self._service.worker.generation, live)

    async def create(self, sampler: Sampler) -> None:
        """Enter a new sampler in the books."""
        await self._service.store.run(lambda connection: books.replace(connection, sampler))
        self.enter(sampler)

    async def run(self, operation: Operation) -> None:
        """Have a sample made."""
        service = self._service
        payload = await service.payload(operation)
        while operation.status == "waiting":
            try:
                name = await self._ready(self.records[operation.line])
                head = {"command": "sample", "sampler": name, "seed": operation.details["seed"]}
                answer, content = await service.worker.call(operation.id, head, payload)
            except Refused as refusal:
                await service.fail(operation, str(refusal), "user")
            except WorkerLost as lost:
                operation.deaths += lost.guilty
                if operation.deaths >= _MOST_DEATHS:
                    await service.fail(operation, "the worker died while this grew; see the server's log", "server")
            else:
                service.metrics.sampled(answer["tokens"])
                if operation.status == "waiting":  # it may have been given up meanwhile
                    await service.finish(operation, content, answer["media"])

    def unload(self, sampler_id: str) -> None:
        """Free what the worker keeps of a sampler; it is brought back when it is needed."""
        if self._loaded.pop(sampler_id, None) is not None:
            self._service.worker.tell({"command": "drop_sampler", "sampler": sampler_id})

    async def remove(self, sampler_id: str) -> None:
        """Let a sampler be gone."""
        self.unload(sampler_id)
        sampler = self.records.pop(sampler_id)
        self._locks.pop(sampler_id, None)
        await self._service.store.run(lambda connection: books.delete(connection, sampler))
        if sampler.directory is not None and sampler.model_path is None:
            await asyncio.to_thread(self._service.files.remove, Path(sampler.directory))

    async def _ready(self, sampler: Sampler) -> str | None:
        """Let the worker have a sampler's weights.

        Returns:
            its name there; None for the base.
        """
        service = self._service
        if sampler.directory is None and sampler.model_id is None:
            return None
        line = service.lines[sampler.model_id] if sampler.model_id is not None else None
        async with self._locks.setdefault(sampler.id, asyncio.Lock()):
            if line is None:
                await self._load(sampler, 0)
            else:
                async with line.lock:
                    await line.load()
                    await self._load(sampler, line.loads)
        return sampler.id

    async def _load(self, sampler: Sampler, loads: int) -> None:
        worker = self._service.worker
        if self._loaded.get(sampler.id) == (worker.generation, loads):
            return
        head = {
            "command": "load_sampler",
            "sampler": sampler.id,
            "model": sampler.model_id,
            "directory": sampler.directory,
        }
        await worker.call(f"{sampler.id}:load", head)
        self._loaded[sampler.id] = (worker.generation, loads)
