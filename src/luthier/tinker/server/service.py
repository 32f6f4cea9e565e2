"""The server behind its routes: books in memory and on disk, operations submitted, done once, and fetched.

An operation is entered in the books before it is acknowledged, and its result before it is handed out, so that a
server that is killed goes on where it was: what was acknowledged is done, and done once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import sqlalchemy as sql

from luthier.errors import ConfigError
from luthier.tinker.server import store as books
from luthier.tinker.server.files import Files, parse_path
from luthier.tinker.server.line import Line
from luthier.tinker.server.metrics import Metrics
from luthier.tinker.server.process import WorkerProcess
from luthier.tinker.server.records import ENDED, Category, Checkpoint, Kind, Model, Operation, Sampler, Session
from luthier.tinker.server.samplers import Samplers
from luthier.tinker.server.store import Store

MOST_WAITING = 20_000
"""Operations that may wait; more are put off."""


class Unknown(Exception):
    """There is no such thing, or it is someone else's: nobody is told which."""


class Conflict(Exception):
    """The number is taken by another request, or was long ago."""


class Overloaded(Exception):
    """Too much waits already."""


class Service:
    """All that the server knows and does.

    Args:
        store: where the books are.
        files: where weights are.
        worker: what computes; started already.
        names: what clients may call the base model; the first is its own.
        metrics: what is counted.
    """

    def __init__(
        self, store: Store, files: Files, worker: WorkerProcess, names: tuple[str, ...], metrics: Metrics
    ) -> None:
        self.store = store
        self.files = files
        self.worker = worker
        self.names = names
        self.metrics = metrics
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.operations: dict[str, Operation] = {}
        self.lines: dict[str, Line] = {}
        self.samplers = Samplers(self)
        self._closing: set[str] = set()
        """Operations whose end is being entered in the books."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read the books, and go on with what had not ended."""
        read = self.store.run
        for session in await read(lambda c: books.load(c, Session)):
            self.sessions[session.id] = session
        for model in await read(lambda c: books.load(c, Model)):
            self.models[model.id] = model
        for sampler in await read(lambda c: books.load(c, Sampler)):
            self.samplers.records[sampler.id] = sampler
        for checkpoint in await read(lambda c: books.load(c, Checkpoint)):
            self.checkpoints[checkpoint.path] = checkpoint
        by_line: dict[str, list[Operation]] = {}
        for operation in await read(lambda c: books.load(c, Operation)):
            if operation.status != "waiting":
                operation.finished.set()
            self.operations[operation.id] = operation
            by_line.setdefault(operation.line, []).append(operation)
        self.metrics.resumed(sum(operation.status == "waiting" for operation in self.operations.values()))
        for model in self.models.values():
            self._line(model, by_line.get(model.id, []))
        for line in self.lines.values():
            if self.sessions[line.model.session_id].ended is not None:
                self.sessions[line.model.session_id].held = False
                line.is_over = True
                if line.model.snapshot >= 0:
                    self.begin(line.close())
        for operation in self.operations.values():
            if operation.kind == "sample" and operation.status == "waiting":
                self.begin(self.samplers.run(operation))

    async def close(self) -> None:
        """Stop what runs; nothing is lost by it."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let something run beside."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    # --- looking up -----------------------------------------------------------------------------------------------

    def session(self, session_id: str, owner: str) -> Session:
        """Raises: Unknown."""
        return self._owned(self.sessions.get(session_id), owner)

    def model(self, model_id: str, owner: str) -> Model:
        """Raises: Unknown."""
        return self._owned(self.models.get(model_id), owner)

    def operation(self, operation_id: str, owner: str) -> Operation:
        """Raises: Unknown."""
        return self._owned(self.operations.get(operation_id), owner)

    def checkpoint(self, path: str, owner: str, kind: Kind | None = None) -> Checkpoint:
        """A checkpoint that this owner may read.

        Raises:
            Unknown: there is none.
            ConfigError: the path is none, or that of another kind of weights.
        """
        _, found_kind, _ = parse_path(path)
        if kind is not None and found_kind != kind:
            raise ConfigError(f"{path} holds {found_kind}", where="path", remedy=f"give a path of {kind}")
        found = self.checkpoints.get(path)
        if found is None or not (found.public or found.owner == owner):
            raise Unknown
        if found.is_over(time.time()):
            raise Unknown
        return found

    def alive(self, session: Session) -> None:
        """Note a sign of life."""
        session.seen, session.held = time.monotonic(), True

    @staticmethod
    def _owned(record: Any, owner: str) -> Any:
        if record is None or record.owner != owner:
            raise Unknown
        return record

    # --- operations -----------------------------------------------------------------------------------------------

    async def submit(self, operation: Operation, payload: bytes, model: Model | None = None) -> Operation:
        """Enter an operation, and let it be done in its turn.

        Args:
            operation: what is asked.
            payload: what goes with it.
            model: that it makes.

        Returns:
            the operation, or the one that it repeats.

        Raises:
            Conflict: its number is another's.
            Overloaded: too much waits.
        """
        if (earlier := self.operations.get(operation.id)) is not None:
            if earlier.digest != operation.digest:
                raise Conflict
            # acknowledged when it is in the books, and not before
            await self.store.run(lambda connection: None)
            if operation.id not in self.operations:
                raise Conflict
            return earlier
        if (line := self.lines.get(operation.line)) is not None and operation.number < line.next:
            raise Conflict  # done, fetched and forgotten
        if self.metrics.waiting() >= MOST_WAITING:
            raise Overloaded
        self.operations[operation.id] = operation

        def enter(connection: sql.Connection) -> None:
            if model is not None:
                books.replace(connection, model)
            books.replace(connection, operation, payload=payload)

        entered = False
        try:
            await self.store.run(enter)
            entered = True
        finally:
            if not entered:  # it may be sent again
                del self.operations[operation.id]
        self.metrics.submitted(operation)
        if model is not None:
            self.models[model.id] = model
            self._line(model, [])
        if operation.kind == "sample":
            if operation.status == "waiting":
                self.begin(self.samplers.run(operation))
        else:
            self.lines[operation.line].add(operation)
        return operation

    async def finish(
        self,
        operation: Operation,
        result: bytes = b"",
        media: str = "application/json",
        *,
        also: Callable[[sql.Connection], None] | None = None,
    ) -> None:
        """Enter a result, then let it be fetched.

        Args:
            also: what is to be entered in the same transaction.
        """
        await self._close(operation, "done", {"media": media, "result": result}, also)

    async def fail(self, operation: Operation, error: str, category: Category) -> None:
        """Enter that an operation failed."""
        error = error.replace("\0", "\\0")  # which PostgreSQL does not keep
        await self._close(operation, "failed", {"error": error, "category": category}, None)

    async def payload(self, operation: Operation) -> bytes:
        """What was sent."""
        table = books.operations
        query = sql.select(table.c.payload).where(table.c.id == operation.id)
        found = await self.store.run(lambda connection: connection.execute(query).scalar_one_or_none())
        return bytes(found or b"")

    async def result(self, operation: Operation) -> bytes:
        """What it gave; the books note that it was fetched."""
        table = books.operations

        def fetch(connection: sql.Connection) -> bytes:
            found = connection.execute(
                sql.select(table.c.result).where(table.c.id == operation.id)
            ).scalar_one_or_none()
            if not operation.is_fetched:
                values = {"fetched": time.time()}
                connection.execute(table.update().where(table.c.id == operation.id).values(values))
            return bytes(found or b"")

        content = await self.store.run(fetch)
        operation.is_fetched = True
        return content

    async def forget(self, gone: list[str], passed: dict[str, int]) -> None:
        """Strike operations out.

        Args:
            gone: ids of them.
            passed: model -> the number below which all of its have ended; a restarted server would wait for those that
                are struck out.
        """
        table, models = books.operations, books.models

        def enter(connection: sql.Connection) -> None:
            for model_id, number in passed.items():
                connection.execute(models.update().where(models.c.id == model_id).values(passed=number))

        if passed:
            await self.store.run(enter)
        for start in range(0, len(gone), 500):
            part = gone[start : start + 500]
            await self.store.run(lambda c, part=part: c.execute(table.delete().where(table.c.id.in_(part))))  # type: ignore[misc]
        for operation_id in gone:
            self.operations.pop(operation_id, None)

    async def _close(
        self,
        operation: Operation,
        status: Any,
        values: dict[str, Any],
        also: Callable[[sql.Connection], None] | None,
    ) -> None:
        if operation.status != "waiting" or operation.id in self._closing:  # it was given up and finished at once
            return
        table = books.operations

        def enter(connection: sql.Connection) -> None:
            connection.execute(table.update().where(table.c.id == operation.id).values(status=status, **values))
            if also is not None:
                also(connection)

        self._closing.add(operation.id)
        try:
            await self.store.run(enter)
        finally:
            self._closing.discard(operation.id)
        operation.error, operation.category = values.get("error"), values.get("category")
        operation.media = values.get("media", operation.media)
        operation.status = status
        operation.finished.set()
        operation.finished = ENDED
        self.metrics.finished(operation)

    def _line(self, model: Model, known: list[Operation]) -> None:
        line = self.lines[model.id] = Line(self, model, known)
        self.begin(line.run())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.metrics.crashed(error)
