"""Results, waited for. A poll is held until there is one, or for some time; the SDK asks again at once."""

from __future__ import annotations

import asyncio
import random
from typing import Annotated

from fastapi import APIRouter, Request, Response
from tinker import types

from luthier.tinker.server import upkeep
from luthier.tinker.server.http import Owner, TheService, answer, body_of, owner_of, parse, service_of, taking
from luthier.tinker.server.wire import as_json

HOLD_SECONDS = 25.0
"""How long a poll is held at most; the SDK gives up after 45."""
_LEAST_HOLD = 0.8
"""Share of that time after which some polls are let go, so that clients that came at once do not come back at once."""
_LARGE = 10 * 1024 * 1024
"""Bytes of a result that the SDK likes to make room for before it gets it."""
router = APIRouter()


async def retrieve_future(request: Request) -> Response:
    """The result of an operation, or that there is none yet. What thousands ask again and again is found and read
    without FastAPI's help, which takes half of the time of a poll."""
    service, owner = await service_of(request), await owner_of(request)
    given = parse(types.FutureRetrieveRequest, await body_of(request))
    operation = service.operation(given.request_id, owner)
    if (session := service.sessions.get(operation.session_id)) is not None and session.ended is None:
        service.alive(session)
    service.metrics.polls(1)
    try:
        async with asyncio.timeout(HOLD_SECONDS * random.uniform(_LEAST_HOLD, 1)):
            await operation.finished.wait()
    except TimeoutError:
        told = {"type": "try_again", "request_id": operation.id, "queue_state": "active"}
        return Response(as_json(told), 408, media_type="application/json")
    finally:
        service.metrics.polls(-1)
    if operation.status == "failed":
        return answer({"error": operation.error, "category": operation.category})
    content = await service.result(operation)
    if given.allow_metadata_only and len(content) > _LARGE:
        return answer({"status": "complete_metadata", "response_payload_size": len(content)})
    return Response(content, media_type=operation.media)


@router.post("/cancel_future", status_code=204)
async def cancel_future(
    service: TheService,
    owner: Owner,
    given: Annotated[types.FutureRetrieveRequest, taking(types.FutureRetrieveRequest)],
) -> Response:
    """Stop a sample that nobody waits for any more; other operations stand in a line, and stay."""
    operation = service.operation(given.request_id, owner)
    if operation.kind == "sample":
        await upkeep.give_up_sample(service, operation, "its client cancelled it")
    return Response(status_code=204)
