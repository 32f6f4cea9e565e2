"""Sessions: a client comes, says that it is there, and goes."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from tinker import types

from luthier.tinker.server import store as books
from luthier.tinker.server import upkeep
from luthier.tinker.server.http import Owner, TheService, answer, taking
from luthier.tinker.server.records import Session
from luthier.tinker.server.service import Unknown

TESTED_SDK = "0.38"
router = APIRouter()


@router.get("/healthz", openapi_extra={"security": []})
async def healthz() -> Response:
    """Whether the server is up; asks for no key and tells nothing else."""
    return answer({"status": "ok"})


@router.post("/client/config")
async def client_config(owner: Owner) -> Response:
    """How the SDK is to behave."""
    return answer({"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False})


@router.post("/client/dynamic_config")
async def dynamic_config(owner: Owner) -> Response:
    """How the SDK is to behave, asked again and again."""
    return answer({"sample_cancel_enabled": True})


@router.post("/telemetry")
async def telemetry(owner: Owner) -> Response:
    """What the SDK reports of itself; it is accepted and kept nowhere."""
    return answer({"status": "accepted"})


@router.get("/get_server_capabilities")
async def capabilities(service: TheService, owner: Owner) -> Response:
    """Which models there are."""
    context = service.worker.facts["context"]
    supported = {"model_name": service.names[0], "max_context_length": context, "trainable": True, "sampleable": True}
    return answer({"supported_models": [supported]})


@router.post("/create_session")
async def create_session(
    service: TheService, owner: Owner, given: Annotated[types.CreateSessionRequest, taking(types.CreateSessionRequest)]
) -> Response:
    """A client comes."""
    session = Session(uuid.uuid4().hex, owner, time.time(), given.model_dump(exclude={"type"}))
    await service.store.run(lambda connection: books.replace(connection, session))
    service.sessions[session.id] = session
    told: dict[str, Any] = {"session_id": session.id, "type": "create_session"}
    if not given.sdk_version.startswith(f"{TESTED_SDK}."):
        told["warning_message"] = f"this server was tested with tinker {TESTED_SDK}, not {given.sdk_version[:40]}"
    return answer(told)


@router.post("/session_heartbeat")
async def heartbeat(
    service: TheService,
    owner: Owner,
    given: Annotated[types.SessionHeartbeatRequest, taking(types.SessionHeartbeatRequest)],
) -> Response:
    """A client is still there."""
    session = service.sessions.get(given.session_id)
    if session is None or session.owner != owner or session.ended is not None:
        return Response('{"error": "the session is over"}', 410, media_type="application/json")
    service.alive(session)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/search")
async def search(
    service: TheService, owner: Owner, given: Annotated[types.SessionSearchRequest, taking(types.SessionSearchRequest)]
) -> Response:
    """Sessions of one's own, newest first."""
    found = []
    for session in sorted(service.sessions.values(), key=lambda session: -session.created):
        data = session.metadata
        told = {key: str(value) for key, value in (data.get("user_metadata") or {}).items()}
        name = data.get("display_name")
        words = (given.display_name or "").lower().split()
        matches = session.owner == owner and (given.session_id is None or session.id == given.session_id)
        matches = matches and given.user_metadata.items() <= told.items()
        if not matches or not all(word in (name or "").lower() for word in words):
            continue
        kept = [one for one in service.checkpoints.values() if one.model_id.startswith(f"{session.id}:")]
        found.append(
            {
                "session_id": session.id,
                "created_at": datetime.fromtimestamp(session.created, UTC).isoformat(),
                "owner": owner[:8],
                "project_id": data.get("project_id") or "",
                "checkpoints_count": len(kept),
                "display_name": name,
                "user_metadata": told or None,
                "checkpoint_storage_bytes": sum(one.size for one in kept),
            }
        )
    return answer({"sessions": found[: given.limit], "next_cursor": None})


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(service: TheService, owner: Owner, session_id: str) -> Response:
    """A client goes."""
    session = service.session(session_id, owner)
    if session.ended is None:
        await upkeep.end(service, session)
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(
    service: TheService,
    owner: Owner,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
) -> Response:
    """Sessions of one's own, newest first."""
    own = [one for one in service.sessions.values() if one.owner == owner]
    own.sort(key=lambda session: -session.created)
    return answer({"sessions": [session.id for session in own[offset : offset + limit]]})


@router.get("/sessions/{session_id}")
async def get_session(service: TheService, owner: Owner, session_id: str) -> Response:
    """What belongs to a session."""
    session = service.session(session_id, owner)
    data = session.metadata
    told = {str(key): str(value) for key, value in (data.get("user_metadata") or {}).items()}
    return answer(
        {
            "training_run_ids": [one.id for one in service.models.values() if one.session_id == session_id],
            "sampler_ids": [one.id for one in service.samplers.records.values() if one.session_id == session_id],
            "user_metadata": told or None,
            "display_name": data.get("display_name"),
        }
    )


def living(service: TheService, session_id: str, owner: str) -> Session:
    """A session that is not over; asking is a sign of life.

    Raises:
        Unknown: there is none.
    """
    session = service.session(session_id, owner)
    if session.ended is not None:
        raise Unknown
    service.alive(session)
    return session
