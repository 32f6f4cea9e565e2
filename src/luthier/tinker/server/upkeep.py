"""What the server does by the clock: clients that vanished, weights that expire, results that were fetched."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError

from luthier.tinker.server import store as books
from luthier.tinker.server.records import Checkpoint, Operation, Session

if TYPE_CHECKING:
    from luthier.tinker.server.service import Service

SILENCE_SECONDS = 120.0
"""After so long without a sign of life (the SDK gives one every 10 seconds) a client is held to be gone."""
_GRACE_SECONDS = 600.0
"""How long a result is kept after it was fetched, in case it did not arrive."""
_LONGEST_SECONDS = 24 * 3600.0
"""How long what nobody fetches is kept, and weights without a name whose client is gone."""
_EVERY_SECONDS = 5.0


async def keep_up(service: Service) -> None:
    """Look after everything, for ever."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        try:
            await look_after(service, time.time())
        except (SQLAlchemyError, OSError) as error:
            service.metrics.crashed(error)


async def look_after(service: Service, now: float) -> None:
    """Look after everything once.

    Args:
        now: seconds since the epoch.
    """
    for session in [*service.sessions.values()]:
        if session.held and time.monotonic() - session.seen > SILENCE_SECONDS:
            await let_go(service, session, "its client has not been heard of")
    service.metrics.sessions(sum(session.held and session.ended is None for session in service.sessions.values()))
    for checkpoint in [*service.checkpoints.values()]:
        if checkpoint.is_over(now):
            await remove_checkpoint(service, checkpoint)
    await _forget_results(service, now)
    await _forget_samplers(service, now)


async def let_go(service: Service, session: Session, why: str) -> None:
    """Drop what a session has waiting, and free what is kept ready for it. Nothing that was done is lost: a client that
    comes back finds its models where they were."""
    session.held = False
    lines = [line for line in service.lines.values() if line.model.session_id == session.id]
    for line in lines:
        for operation in line.waiting:
            await line.give_up(operation, why)
    for operation in [*service.operations.values()]:
        if operation.session_id == session.id and operation.kind == "sample" and operation.status == "waiting":
            await give_up_sample(service, operation, why)
    for line in lines:  # when what the worker is at has ended
        service.begin(line.unload())
    for sampler in service.samplers.records.values():
        if sampler.session_id == session.id:
            service.begin(service.samplers.unload(sampler.id))


async def give_up_sample(service: Service, operation: Operation, why: str) -> None:
    """Stop a sample, unless it has ended."""
    await service.fail(operation, f"it was given up: {why}", "user")
    service.worker.forget(operation.id)


async def end(service: Service, session: Session) -> None:
    """Close a session at its client's wish: what has no name goes."""
    session.ended = time.time()
    table = books.sessions
    await service.store.run(
        lambda connection: connection.execute(
            table.update().where(table.c.id == session.id).values(ended=session.ended)
        )
    )
    await let_go(service, session, "its session was closed")
    for sampler in [*service.samplers.records.values()]:
        if sampler.session_id == session.id:
            await service.samplers.remove(sampler.id)
    for line in service.lines.values():
        if line.model.session_id == session.id:
            service.begin(line.close())


async def remove_checkpoint(service: Service, checkpoint: Checkpoint) -> None:
    """Delete weights with a name, and what samples from them: the entry first, then the files."""
    if service.checkpoints.get(checkpoint.path) is not checkpoint:  # it was removed or overwritten meanwhile
        return
    del service.checkpoints[checkpoint.path]
    for sampler in [*service.samplers.records.values()]:
        if sampler.model_path == checkpoint.path:
            await service.samplers.remove(sampler.id)
    await service.store.run(lambda connection: books.delete(connection, checkpoint))
    directory = service.files.checkpoint(checkpoint.model_id, checkpoint.kind, checkpoint.name)
    await asyncio.to_thread(service.files.remove, directory)


async def _forget_results(service: Service, now: float) -> None:
    """Strike out operations whose results were fetched, or never will be, unless they may have to be done again."""
    table = books.operations
    old = sql.or_(table.c.fetched < now - _GRACE_SECONDS, table.c.created < now - _LONGEST_SECONDS)
    query = sql.select(table.c.id).where(table.c.status != "waiting", old)
    found = await service.store.run(lambda connection: connection.execute(query).scalars().all())
    gone = []
    passed: dict[str, int] = {}
    for operation_id in found:
        operation = service.operations.get(operation_id)
        if operation is None:
            continue
        line = service.lines.get(operation.line)
        if line is None or not line.needs(operation):
            gone.append(operation_id)
            if line is not None:
                line.drop(operation)
                passed[line.model.id] = line.next
    await service.forget(gone, passed)


async def _forget_samplers(service: Service, now: float) -> None:
    """Weights without a name go when nobody has sampled from them for a day: a loop makes new ones at every step."""
    for sampler in [*service.samplers.records.values()]:
        used = service.samplers.used.get(sampler.id, sampler.created)
        if used < now - _LONGEST_SECONDS and service.samplers.is_idle(sampler.id):
            await service.samplers.remove(sampler.id)
