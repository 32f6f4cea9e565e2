"""Weights with names: listed, published, given an end, deleted, fetched. And the training runs that they are of."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse

from luthier.errors import ConfigError
from luthier.tinker.server import store as books
from luthier.tinker.server import upkeep
from luthier.tinker.server.files import LINK_SECONDS, parse_path
from luthier.tinker.server.http import Owner, TheService, answer, taking
from luthier.tinker.server.records import Checkpoint, Kind, Model
from luthier.tinker.server.service import Service, Unknown

_TYPES: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1 << 40)]
router = APIRouter()
links = APIRouter()
"""Asks for no key: a link authenticates itself."""


class Lifetime(pydantic.BaseModel):
    """How long a checkpoint stays from now on; None for ever."""

    ttl_seconds: Annotated[int, pydantic.Field(gt=0, le=100 * 366 * 24 * 3600)] | None = None


class PathOfWeights(pydantic.BaseModel):
    """A tinker path."""

    tinker_path: str


@router.get("/training_runs")
async def list_training_runs(service: TheService, owner: Owner, limit: Limit = 20, offset: Offset = 0) -> Response:
    """Training runs of one's own, the last used first."""
    own = sorted((one for one in service.models.values() if one.owner == owner), key=lambda model: -model.used)
    runs = [_run(service, model) for model in own[offset : offset + limit]]
    return answer({"training_runs": runs, "cursor": _cursor(offset, limit, len(own))})


@router.get("/training_runs/{model_id}")
async def get_training_run(service: TheService, owner: Owner, model_id: str) -> Response:
    """A training run."""
    return answer(_run(service, service.model(model_id, owner)))


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(service: TheService, owner: Owner, model_id: str) -> Response:
    """Checkpoints of a training run, oldest first."""
    service.model(model_id, owner)
    found = sorted(_of(service, model_id), key=lambda one: one.created)
    return answer({"checkpoints": [_told(one) for one in found]})


@router.get("/checkpoints")
async def list_all_checkpoints(service: TheService, owner: Owner, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Checkpoints of one's own, newest first."""
    own = [one for one in service.checkpoints.values() if one.owner == owner and _is_there(one)]
    own.sort(key=lambda one: -one.created)
    told = [_told(one) for one in own[offset : offset + limit]]
    return answer({"checkpoints": told, "cursor": _cursor(offset, limit, len(own))})


@router.post("/weights_info")
async def weights_info(
    service: TheService, owner: Owner, given: Annotated[PathOfWeights, taking(PathOfWeights)]
) -> Response:
    """What weights are of."""
    model = service.models[service.checkpoint(given.tinker_path, owner).model_id]
    lora = model.lora or {}
    gates = {key: lora.get(key) for key in ("train_unembed", "train_mlp", "train_attn")}
    told = {"base_model": model.base_model, "is_lora": model.lora is not None, "lora_rank": lora.get("rank"), **gates}
    return answer({key: value for key, value in told.items() if value is not None})


async def own_checkpoint(service: TheService, owner: Owner, model_id: str, kind: str, name: str) -> Checkpoint:
    """The checkpoint that a path means, which is the asker's to change.

    Raises:
        Unknown: there is none.
    """
    path = f"tinker://{model_id}/{kind}/{name}"
    parse_path(path)
    found = service.checkpoints.get(path)
    if found is None or found.owner != owner or not _is_there(found):
        raise Unknown
    return found


Own = Annotated[Checkpoint, Depends(own_checkpoint)]


@router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(service: TheService, checkpoint: Own) -> Response:
    """Delete weights."""
    async with service.lines[checkpoint.model_id].lock:  # after a save of its name that is under way
        await upkeep.remove_checkpoint(service, service.checkpoints.get(checkpoint.path, checkpoint))
    return Response(status_code=204)


@router.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(service: TheService, checkpoint: Own, given: Annotated[Lifetime, taking(Lifetime)]) -> Response:
    """Let weights expire, or not."""
    checkpoint.expires = None if given.ttl_seconds is None else time.time() + given.ttl_seconds
    return await _keep(service, checkpoint)


@router.post("/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def publish(service: TheService, checkpoint: Own) -> Response:
    """Let everyone with a key read weights."""
    checkpoint.public = True
    return await _keep(service, checkpoint)


@router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def unpublish(service: TheService, checkpoint: Own) -> Response:
    """Let nobody else read weights any more."""
    checkpoint.public = False
    return await _keep(service, checkpoint)


@router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    service: TheService, owner: Owner, request: Request, model_id: str, kind: str, name: str
) -> Response:
    """Links to the files of external weights, good for an hour."""
    checkpoint = service.checkpoint(f"tinker://{model_id}/{kind}/{name}", owner, "external_weights")
    directory = service.files.checkpoint(model_id, "external_weights", checkpoint.name)
    expires = int(time.time()) + LINK_SECONDS
    base = str(request.base_url).rstrip("/")
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    urls = {file: service.files.link(base, model_id, name, file, expires) for file in files if not file.startswith(".")}
    return answer({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})


@links.get("/files/{model_id}/{name}/{file:path}", openapi_extra={"security": []})
async def fetch(
    service: TheService, model_id: str, name: str, file: str, expires: Annotated[int, Query()], signature: str
) -> Response:
    """A file that a link means."""
    checkpoint = service.checkpoints.get(f"tinker://{model_id}/external_weights/{name}")
    found = None
    if checkpoint is not None and _is_there(checkpoint):
        found = service.files.linked(model_id, name, file, expires, signature)
    if found is None:
        raise Unknown
    return FileResponse(found, media_type="application/octet-stream")


@router.post("/copy_weights")
async def copy_weights(owner: Owner) -> Response:
    """Not here."""
    what = "weights are not copied between projects, of which there are none here"
    raise ConfigError(what, where="copy_weights", remedy="load them into a model and save that")


@router.post("/create_custom_loss")
async def create_custom_loss(owner: Owner) -> Response:
    """Not here."""
    what = "losses of one's own run at the client"
    raise ConfigError(what, where="create_custom_loss", remedy="give the function itself to forward_backward_custom")


async def _keep(service: Service, checkpoint: Checkpoint) -> Response:
    await service.store.run(lambda connection: books.replace(connection, checkpoint))
    return Response(status_code=204)


def _of(service: Service, model_id: str) -> Iterable[Checkpoint]:
    return (one for one in service.checkpoints.values() if one.model_id == model_id and _is_there(one))


def _is_there(checkpoint: Checkpoint) -> bool:
    return not checkpoint.is_over(time.time())


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _told(checkpoint: Checkpoint) -> dict[str, Any]:
    expires = checkpoint.expires
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": datetime.fromtimestamp(checkpoint.created, UTC).isoformat(),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": checkpoint.public,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
    }


def _run(service: Service, model: Model) -> dict[str, Any]:
    found = sorted(_of(service, model.id), key=lambda one: one.created)
    last = {kind: _told(one) for one in found for kind in [one.kind]}
    notes = {str(key): str(value) for key, value in (model.metadata or {}).items()}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner[:8],
        "is_lora": model.lora is not None,
        "corrupted": False,
        "lora_rank": None if model.lora is None else model.lora["rank"],
        "last_request_time": datetime.fromtimestamp(model.used, UTC).isoformat(),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": notes or None,
    }
