"""A model's operations, one after the other in the order of their numbers; and what a model is brought back from.

A worker may die, and the whole server too. Then the model is made again from its last snapshot, and the operations
since are done again in the same order: they are deterministic, so the weights are the same to the bit. Only what
changes weights is done again, and no result is told twice. A snapshot is taken with weights that were loaded, and
after an optimizer step as often as to keep that repetition short: no gradients are about then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from luthier.errors import UserError
from luthier.tinker.server import store as books
from luthier.tinker.server.process import Refused, WorkerLost
from luthier.tinker.server.records import Checkpoint, Kind, Model, Operation, Sampler
from luthier.tinker.server.wire import as_json

if TYPE_CHECKING:
    from luthier.tinker.server.service import Service

GAP_SECONDS = 300.0
"""How long a number may be missing while later ones are there; the SDK gives up after as long."""
_REPLAY_SECONDS = 10.0
"""Computation that is worth a snapshot, so that it need not be repeated."""
_SNAPSHOT_SHARE = 20
"""Snapshots take at most one part in so many of the time."""
_MOST_DEATHS = 2
"""Workers that an operation may end before it is given up."""
_PAUSE = 1.0
"""Seconds after which a line goes on where the books or the disk failed."""
_CHANGES = ("forward_backward", "optim_step", "refused")


class Line:
    """The operations of one model.

    Args:
        service: whose it is.
        model: of it.
        known: its operations in the books.
    """

    def __init__(self, service: Service, model: Model, known: list[Operation]) -> None:
        self._service = service
        self.model = model
        self._operations = {operation.number: operation for operation in known}
        self.next = max(model.passed, model.snapshot + 1)
        """Number of the operation that is at work, or that is waited for."""
        while (one := self._operations.get(self.next)) is not None and one.status != "waiting":
            self.next += 1
        self._changed = asyncio.Event()
        self._current: Operation | None = None
        self._gap: float | None = None
        """Since when a number is waited for while later ones are there."""
        self._generation = 0
        """Of the worker that has the model as it is now."""
        self._asked = 0
        """Of the worker that calls are meant for."""
        self._cost = 0.0
        self._snapshot_seconds = 0.0
        self.lock = asyncio.Lock()
        """Held while the worker does something for this model."""
        self.loads = 0
        """Counts how often the model was made in a worker."""
        self.is_over = False
        """Whether its session was closed, so that nobody will ask for more."""

    def add(self, operation: Operation) -> None:
        """Let an operation wait for its turn."""
        self._operations[operation.number] = operation
        self._changed.set()

    @property
    def waiting(self) -> list[Operation]:
        """What has not been done."""
        return [operation for operation in self._operations.values() if operation.status == "waiting"]

    def needs(self, operation: Operation) -> bool:
        """Whether an operation that has ended may have to be done again, or is still to be passed over."""
        if operation.number >= self.next:
            return True
        return not self.is_over and operation.number > self.model.snapshot and operation.kind in _CHANGES

    def drop(self, operation: Operation) -> None:
        """Forget one that has ended and will not be done again."""
        self._operations.pop(operation.number, None)

    async def run(self) -> None:
        """Do what comes, for ever."""
        while True:
            try:
                await self._go_on()
            except (SQLAlchemyError, OSError) as error:
                self._service.metrics.crashed(error)
                self._generation = 0  # the worker may have done what the books do not know
                await asyncio.sleep(_PAUSE)

    async def _go_on(self) -> None:
        operation = self._operations.get(self.next)
        if operation is None:
            await self._wait()
            return
        if operation.kind != "refused":
            self._gap = None
        if operation.status == "waiting":
            self._current = operation
            try:
                await self._do(operation)
            finally:
                self._current = None
        else:
            await self._pass_over(operation)
        self.next += 1
        if operation.status == "done" and self._is_due(operation):
            await self._take_snapshot(operation.number)

    async def load(self) -> int:
        """Let the worker have the model as it is now. The caller holds the lock.

        Returns:
            the worker's generation.

        Raises:
            WorkerLost: try again.
            Refused: it cannot be made.
        """
        generation = await self._service.worker.here()
        if self._generation == generation:
            return generation
        model = self.model
        self._generation, self._asked = 0, generation
        await self._call("load", {"command": "create", "lora": model.lora, "seed": model.seed})
        if model.snapshot >= 0:
            directory = self._service.files.snapshots(model.id) / str(model.snapshot)
            await self._call("load", {"command": "restore", "directory": str(directory), "optimizer": True})
        for number in sorted(self._operations):
            operation = self._operations[number]
            if model.snapshot < number < self.next and operation.kind in _CHANGES:
                await self._again(operation)
        self._generation = generation
        self.loads += 1
        return generation

    async def give_up(self, operation: Operation, why: str) -> None:
        """Let an operation that waits fail, unless the worker is at it already."""
        if operation.status == "waiting" and operation is not self._current:
            await self._service.fail(operation, f"it was given up: {why}", "server")

    async def unload(self) -> None:
        """Free what the worker keeps of the model; it is brought back when it is needed."""
        async with self.lock:
            self._service.worker.tell({"command": "unload", "model": self.model.id})
            self._generation = 0

    async def close(self) -> None:
        """Forget what the model would be brought back from, once all that waits has ended: its session was closed."""
        self.is_over = True
        for operation in self.waiting:
            await operation.finished.wait()
        await self.unload()
        model, table = self.model, books.models
        await self._service.store.run(
            lambda connection: connection.execute(table.update().where(table.c.id == model.id).values(snapshot=-1))
        )
        model.snapshot = -1
        await asyncio.to_thread(self._service.files.remove, self._service.files.snapshots(model.id))

    # --- one operation --------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until something is there; a number that stays away while later ones are there is passed over."""
        self._changed.clear()
        if not any(number > self.next for number in self._operations):
            await self._changed.wait()
            return
        if self._gap is None:
            self._gap = time.monotonic()
        try:
            await asyncio.wait_for(self._changed.wait(), self._gap + GAP_SECONDS - time.monotonic())
        except TimeoutError:
            await self.refuse(self.next, f"request {self.next} never came", breaks=True)

    async def refuse(self, number: int, error: str, *, breaks: bool) -> None:
        """Let a number be one that failed: its request never came, or could not be read.

        Args:
            number: of it.
            error: what was wrong.
            breaks: whether the step that it belongs to is not to be taken.
        """
        model = self.model
        operation_id = f"{model.id}:{number}"
        if number < self.next or operation_id in self._service.operations:
            return
        details, now = {"breaks": breaks}, time.time()
        operation = Operation(
            operation_id, model.owner, model.session_id, model.id, number, "refused", details, "", now
        )
        operation.status, operation.error, operation.category = "failed", error, "user"
        operation.finished.set()
        self._service.operations[operation.id] = operation
        await self._service.store.run(lambda connection: books.replace(connection, operation))
        self.add(operation)

    async def _do(self, operation: Operation) -> None:
        service = self._service
        born = self._operations.get(0)
        if operation.number and born is not None and born.status == "failed":
            await service.fail(operation, f"its model was never made: {born.error}", "user")
        while operation.status == "waiting":
            try:
                async with self.lock:
                    await self.load()
                    await getattr(self, f"_{operation.kind}")(operation)
            except (Refused, UserError) as refusal:
                await service.fail(operation, str(refusal), "user")
            except WorkerLost as lost:
                operation.deaths += lost.guilty
                if operation.deaths >= _MOST_DEATHS:
                    what = "the worker died twice while it was at this; see the server's log"
                    await service.fail(operation, what, "server")
        if operation.category == "server":  # given up in this very moment: the worker did what the books do not know
            self._generation = 0

    async def _pass_over(self, operation: Operation) -> None:
        """Let the step that a refused call belongs to be refused."""
        if not _breaks(operation):
            return
        async with self.lock:
            if self._generation == self._service.worker.generation:  # otherwise `load` will say so
                with contextlib.suppress(Refused, WorkerLost):
                    await self._call(operation.id, {"command": "break", "error": operation.error})

    async def _again(self, operation: Operation) -> None:
        """Repeat what an operation did to the weights."""
        if _breaks(operation):
            await self._call(operation.id, {"command": "break", "error": operation.error})
        if operation.kind == "refused" or operation.category == "server":
            return
        try:
            if operation.kind == "forward_backward":
                await self._call(operation.id, {"command": "forward_backward"}, await self._service.payload(operation))
            elif operation.kind == "optim_step":
                await self._call(operation.id, {"command": "optim_step", **operation.details})
        except Refused:
            if operation.status == "done":
                raise

    async def _call(self, number: str, head: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        number = f"{self.model.id}:{number}" if number == "load" else number
        answer, content = await self._service.worker.call(
            number, {"model": self.model.id, **head}, payload, generation=self._asked
        )
        self._cost += answer.get("seconds", 0.0)
        return answer, content

    async def _create(self, operation: Operation) -> None:
        told = {"model_id": self.model.id, "type": operation.details["type"]}
        if "restore" not in operation.details:
            await self._service.finish(operation, as_json(told))
        else:
            await self._restore(operation, {**told, "path": operation.details["path"]})

    async def _forward_backward(self, operation: Operation) -> None:
        payload = await self._service.payload(operation)
        answer, content = await self._call(operation.id, {"command": "forward_backward"}, payload)
        await self._service.finish(operation, content, answer["media"])

    _forward = _forward_backward

    async def _optim_step(self, operation: Operation) -> None:
        _, content = await self._call(operation.id, {"command": "optim_step", **operation.details})
        await self._service.finish(operation, content)

    async def _load(self, operation: Operation) -> None:
        await self._restore(operation, {"path": operation.details["path"], "type": "load_weights"})

    async def _restore(self, operation: Operation, told: dict[str, Any]) -> None:
        """Read weights, and enter the result together with a snapshot: what they were read from may be overwritten or
        gone when they would have to be read again."""
        number = operation.number
        await self._call(operation.id, {"command": "restore", **operation.details["restore"]})
        seconds = await self._write_snapshot(number)
        await self._service.finish(
            operation, as_json(told), also=lambda c: books.enter_snapshot(c, self.model.id, number)
        )
        if operation.status == "done":
            await self._go_on_from(number, seconds)

    async def _save(self, operation: Operation) -> None:
        checkpoint = self._checkpoint(operation, "weights")
        directory = self._service.files.checkpoint(self.model.id, "weights", checkpoint.name)
        answer, _ = await self._call(operation.id, {"command": "save", "directory": str(directory)})
        await self._keep(operation, checkpoint, answer["bytes"], "save_weights")

    async def _save_sampler(self, operation: Operation) -> None:
        details = operation.details
        if details["path"] is not None:
            await self._save_files(operation, "sampler_weights", "save_weights_for_sampler")
            return
        if details["sampler"] in self._service.samplers.records:
            raise Refused("sampling_session_seq_id: another sampler has it; count on")
        is_live = details["live"]
        directory = None if is_live else str(self._service.files.sampler(details["sampler"]))
        head = {"command": "save_sampler", "directory": directory, "sampler": details["sampler"], "live": is_live}
        await self._call(operation.id, head)
        model = self.model
        name, of = details["sampler"], model.id if is_live else None
        sampler = Sampler(name, model.owner, model.session_id, model.base_model, None, directory, of, time.time())
        told = {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}
        await self._service.finish(operation, as_json(told), also=lambda c: books.replace(c, sampler))
        self._service.samplers.enter(sampler, loaded=(self._generation, self.loads if is_live else 0))
        if self.is_over:
            await self._service.samplers.remove(sampler.id)

    async def _save_external(self, operation: Operation) -> None:
        await self._save_files(operation, "external_weights", "save_weights_external")

    async def _save_files(self, operation: Operation, kind: Kind, answer_type: str) -> None:
        checkpoint = self._checkpoint(operation, kind)
        directory = self._service.files.checkpoint(self.model.id, kind, checkpoint.name)
        head = {"command": "save_sampler", "directory": str(directory), "sampler": None, "live": False}
        answer, _ = await self._call(operation.id, head)
        await self._keep(operation, checkpoint, answer["bytes"], answer_type)

    def _checkpoint(self, operation: Operation, kind: Kind) -> Checkpoint:
        """The checkpoint that an operation is to make.

        Raises:
            Refused: there is one of its name.
        """
        details, model, now = operation.details, self.model, time.time()
        expires = None if details["ttl_seconds"] is None else now + details["ttl_seconds"]
        notes = details["user_metadata"]
        checkpoint = Checkpoint(model.id, kind, details["path"], model.owner, now, 0, expires, False, notes)
        earlier = self._service.checkpoints.get(checkpoint.path)
        if earlier is not None and not earlier.is_over(now) and not details.get("overwrite"):
            remedy = "choose another name" + (", or overwrite=True" if kind == "weights" else "")
            raise Refused(f"{checkpoint.path}: it is there already; {remedy}")
        return checkpoint

    async def _keep(self, operation: Operation, checkpoint: Checkpoint, size: int, answer_type: str) -> None:
        checkpoint.size = size
        told = {"path": checkpoint.path, "size_bytes": size, "type": answer_type}
        await self._service.finish(operation, as_json(told), also=lambda c: books.replace(c, checkpoint))
        self._service.checkpoints[checkpoint.path] = checkpoint

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _is_due(self, operation: Operation) -> bool:
        if self.is_over:
            return False
        worth = max(_REPLAY_SECONDS, _SNAPSHOT_SHARE * self._snapshot_seconds)
        return operation.kind == "optim_step" and self._cost >= worth

    async def _take_snapshot(self, number: int) -> None:
        try:
            async with self.lock:
                await self.load()
                seconds = await self._write_snapshot(number)
        except (Refused, WorkerLost):  # the next step is another occasion
            return
        await self._service.store.run(lambda c: books.enter_snapshot(c, self.model.id, number))
        await self._go_on_from(number, seconds)

    async def _write_snapshot(self, number: int) -> float:
        """Write one that nobody knows of yet; how many seconds it took."""
        directory = self._service.files.snapshots(self.model.id) / str(number)
        answer, _ = await self._call("load", {"command": "save", "directory": str(directory)})
        return float(answer["seconds"])

    async def _go_on_from(self, number: int, seconds: float) -> None:
        """Forget what came before a snapshot that the books know of."""
        service, model = self._service, self.model
        older, model.snapshot = model.snapshot, number
        self._cost, self._snapshot_seconds = 0.0, seconds
        self._operations = {one: operation for one, operation in self._operations.items() if one > number}
        if older >= 0:
            await asyncio.to_thread(service.files.remove, service.files.snapshots(model.id) / str(older))


def _breaks(operation: Operation) -> bool:
    """Whether the step that an operation belongs to must not be taken, though the worker never finished it."""
    if operation.kind == "refused":
        return bool(operation.details["breaks"])
    return operation.category == "server" and operation.kind in ("forward_backward", "optim_step")
