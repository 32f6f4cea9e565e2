"""Models in training: requests are checked, numbered and entered; what they do is done in their turn."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, HTTPException, Response
from google.protobuf.message import Message
from tinker import types

from luthier.errors import ConfigError, DataError, UserError
from luthier.tinker.server.files import check_name, parse_path
from luthier.tinker.server.http import Owner, TheService, answer, body_of, digest, parse, taking
from luthier.tinker.server.records import Model, Operation
from luthier.tinker.server.routes.sessions import living
from luthier.tinker.server.service import Service
from luthier.tinker.server.wire import parse_forward_backward
from luthier.tinker.types import AdamParams

WHOLE = "luthier.train"
"""A key of user_metadata: with the value "full" all weights train, and there are no adapters."""
MOST_RANK = 4096
"""Of adapters."""
MOST_AHEAD = 10_000
"""Numbers that a request may be ahead of the one that is waited for."""
MOST_SECONDS = 100 * 366 * 24 * 3600
"""That weights may be kept for, unless it is for ever."""
Body = Annotated[bytes, Depends(body_of)]
router = APIRouter()


@router.post("/create_model")
async def create_model(
    service: TheService, owner: Owner, given: Annotated[types.CreateModelRequest, taking(types.CreateModelRequest)]
) -> Response:
    """A model in training over the base."""
    living(service, given.session_id, owner)
    _check_base(service, given.base_model)
    _check_optimizer(given.optimizer_config.type)
    whole = (given.user_metadata or {}).get(WHOLE) == "full"
    lora: dict[str, Any] | None = None
    seed = random.getrandbits(31)
    if not whole:
        asked = given.lora_config or types.LoraConfig(rank=32)
        seed = seed if asked.seed is None else asked.seed
        lora = asked.model_dump() | {"seed": seed}
        _check_number(seed, "seed")
        _check_number(asked.rank, "rank", 1, MOST_RANK + 1)
    model = _new_model(owner, given.session_id, given.model_seq_id, given.base_model, lora, seed)
    model.metadata = given.user_metadata
    details = {"type": "create_model"}
    return await _submit(service, model, 0, "create", details, _canonical(given), new=model)


@router.post("/load_weights")
async def load_weights(service: TheService, owner: Owner, body: Body) -> Response:
    """Weights into a model that is there, or a new model with them."""
    if _fields(body).get("model_id") is None:
        given = parse(types.LoadWeightsRequest, body)
        _check_access(given)
        if given.session_id is None or given.model_seq_id is None:
            raise ConfigError("neither model_id and seq_id nor session_id and model_seq_id are there", where="body")
        return await _create_from(service, owner, given, given.session_id, given.model_seq_id)
    async with _numbered(service, owner, *_place(body)) as (model, number):
        given = parse(types.LoadWeightsRequest, body)
        _check_access(given)
        directory = _weights(service, owner, given.path)
        details = {"path": given.path, "restore": {"directory": directory, "optimizer": given.optimizer}}
        return await _submit(service, model, number, "load", details, _canonical(given))


@router.post("/get_info")
async def get_info(
    service: TheService, owner: Owner, given: Annotated[types.GetInfoRequest, taking(types.GetInfoRequest)]
) -> Response:
    """What a model is."""
    model = _living_model(service, given.model_id, owner)
    data = {
        "arch": service.worker.facts["arch"],
        "model_name": model.base_model,
        "tokenizer_id": service.worker.facts["tokenizer_id"],
    }
    return answer(
        {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "is_lora": model.lora is not None,
            "lora_rank": model.lora["rank"] if model.lora is not None else None,
            "model_name": model.base_model,
            "optimizer_config": {"type": "adamw"},
        }
    )


@router.post("/forward_backward")
async def forward_backward(service: TheService, owner: Owner, body: Body) -> Response:
    """The gradient of a loss, or of `forward` the log-probabilities alone. Tensors are read by the worker."""
    try:
        request = parse_forward_backward(body)
    except DataError as error:
        raise HTTPException(422, str(error)) from None
    kind = "forward" if request.forward_only else "forward_backward"
    breaks = not request.forward_only
    async with _numbered(service, owner, request.model_id, request.seq_id, breaks=breaks) as (model, number):
        return await _submit(service, model, number, kind, {}, _canonical(request), body)


@router.post("/optim_step")
async def optim_step(service: TheService, owner: Owner, body: Body) -> Response:
    """One step of the optimizer."""
    async with _numbered(service, owner, *_place(body)) as (model, number):
        given = parse(types.OptimStepRequest, body)
        if not isinstance(given.optim_params, types.AdamParams):
            _check_optimizer(given.optim_params.type)
        adam = AdamParams.read(given.optim_params)
        details = {"adam": {name: getattr(adam, name) for name in AdamParams.__dataclass_fields__}}
        return await _submit(service, model, number, "optim_step", details, _canonical(given))


@router.post("/save_weights")
async def save_weights(service: TheService, owner: Owner, body: Body) -> Response:
    """A checkpoint to train on from."""
    async with _numbered(service, owner, *_place(body)) as (model, number):
        given = parse(types.SaveWeightsRequest, body)
        details = _named(given.path or f"step{number:06}", given.ttl_seconds, given.user_metadata)
        details["overwrite"] = given.overwrite
        return await _submit(service, model, number, "save", details, _canonical(given))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(service: TheService, owner: Owner, body: Body) -> Response:
    """Weights to sample from, with a name or as a sampling session."""
    async with _numbered(service, owner, *_place(body)) as (model, number):
        given = parse(types.SaveWeightsForSamplerRequest, body)
        is_live = given.kind == "inflight"
        if given.path is not None:
            if is_live:
                raise ConfigError("weights in training have no name", where="kind", remedy="use snapshot")
            details = _named(given.path, given.ttl_seconds, given.user_metadata)
        elif given.sampling_session_seq_id is None:
            raise ConfigError("neither path nor sampling_session_seq_id is there", where="body")
        else:
            _check_number(given.sampling_session_seq_id, "sampling_session_seq_id")
            sampler = f"{model.session_id}:sample:{given.sampling_session_seq_id}"
            details = {"path": None, "sampler": sampler, "live": is_live}
        return await _submit(service, model, number, "save_sampler", details, _canonical(given))


@router.post("/save_weights_external")
async def save_weights_external(service: TheService, owner: Owner, body: Body) -> Response:
    """Weights to fetch, as PEFT's files or those of a whole model."""
    async with _numbered(service, owner, *_place(body)) as (model, number):
        given = parse(types.SaveWeightsExternalRequest, body)
        if given.age_encryption_recipients:
            what = "files are not encrypted here"
            raise ConfigError(what, where="age_encryption_recipients", remedy="leave it out, and use TLS")
        details = _named(given.path, given.ttl_seconds, None)
        return await _submit(service, model, number, "save_external", details, _canonical(given))


def _fields(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
        HTTPException: 422, it is none.
    """
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise HTTPException(422, "body: it is no JSON object")
    return sent


def _place(body: bytes) -> tuple[str, int]:
    """Model and number of a request, whatever else is wrong with it.

    Raises:
        HTTPException: 422, it has none.
    """
    sent = _fields(body)
    model_id, number = sent.get("model_id"), sent.get("seq_id")
    if not isinstance(model_id, str):
        raise HTTPException(422, "model_id: it is no text")
    if not isinstance(number, int) or isinstance(number, bool):
        raise HTTPException(422, "seq_id: it is no whole number of 1 or more")
    return model_id, number


@asynccontextmanager
async def _numbered(
    service: Service, owner: str, model_id: str, number: int, *, breaks: bool = False
) -> AsyncIterator[tuple[Model, int]]:
    """Reading and checks of a request that has a number. Where they fail, the number is one of a request that failed,
    so that nobody waits for it.

    Args:
        breaks: whether the step that it belongs to is not to be taken then.
    """
    model = _living_model(service, model_id, owner)
    line = service.lines[model.id]
    if not 1 <= number < 1 << 62:
        raise HTTPException(422, "seq_id: it is no whole number of 1 or more")
    if number > line.next + MOST_AHEAD:
        raise HTTPException(422, f"seq_id: {number} is too far ahead; count up from 1")
    try:
        yield model, number
    except UserError as error:
        await line.refuse(number, str(error), breaks=breaks)
        raise
    except HTTPException as error:
        await line.refuse(number, str(error.detail), breaks=breaks)
        raise


async def _submit(
    service: Service,
    model: Model,
    number: int,
    kind: str,
    details: dict[str, Any],
    told: bytes,
    payload: bytes = b"",
    *,
    new: Model | None = None,
) -> Response:
    """Enter an operation.

    Args:
        told: all that was sent, the same bytes for the same request.
        payload: what the worker is to read.
        new: the model that it makes.
    """
    now = time.time()
    operation = Operation(
        f"{model.id}:{number}",
        model.owner,
        model.session_id,
        model.id,
        number,
        kind,
        details,
        digest(kind.encode(), told),
        now,
    )
    model.used = now
    found = await service.submit(operation, payload, new)
    return answer({"request_id": found.id, "model_id": model.id})


async def _create_from(
    service: Service, owner: str, given: types.LoadWeightsRequest, session_id: str, number: int
) -> Response:
    """A new model with the weights, and so the adapters, of a checkpoint."""
    living(service, session_id, owner)
    repeated = service.operations.get(f"{session_id}:train:{number}:0")
    if repeated is not None and repeated.owner == owner:  # the checkpoint may be gone by now
        return await _submit(service, service.model(repeated.line, owner), 0, "create", {}, _canonical(given))
    directory = _weights(service, owner, given.path)
    source = service.models[parse_path(given.path)[0]]
    if given.base_model is not None:
        _check_base(service, given.base_model)
    if given.optimizer_config is not None:
        _check_optimizer(given.optimizer_config.type)
    model = _new_model(owner, session_id, number, source.base_model, source.lora, source.seed)
    model.metadata = given.user_metadata
    details = {
        "type": "load_weights",
        "path": given.path,
        "restore": {"directory": directory, "optimizer": given.optimizer},
    }
    return await _submit(service, model, 0, "create", details, _canonical(given), new=model)


def _new_model(
    owner: str, session_id: str, number: int, base_model: str, lora: dict[str, Any] | None, seed: int
) -> Model:
    _check_number(number, "model_seq_id")
    now = time.time()
    return Model(f"{session_id}:train:{number}", owner, session_id, base_model, lora, seed, now, now, None)


def _living_model(service: Service, model_id: str, owner: str) -> Model:
    model = service.model(model_id, owner)
    living(service, model.session_id, owner)
    return model


def _weights(service: Service, owner: str, path: str) -> str:
    """Where the weights of a path lie."""
    checkpoint = service.checkpoint(path, owner, "weights")
    return str(service.files.checkpoint(checkpoint.model_id, "weights", checkpoint.name))


def _named(path: str, ttl_seconds: int | None, metadata: dict[str, str] | None) -> dict[str, Any]:
    if ttl_seconds is not None:
        _check_number(ttl_seconds, "ttl_seconds", 1, MOST_SECONDS + 1)
    return {"path": check_name(path), "ttl_seconds": ttl_seconds, "user_metadata": metadata}


def _check_number(number: int, where: str, least: int = 0, above: int = 1 << 62) -> None:
    if not least <= number < above:
        raise ConfigError(f"it is no whole number from {least} to {above - 1}", where=where)


def _check_base(service: Service, name: str) -> None:
    if name not in service.names:
        remedy = f"this server has {service.names[0]}; start another for another model"
        raise ConfigError(f"{name!r} is not here", where="base_model", remedy=remedy)


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise ConfigError(f"{kind!r} is not here", where="optimizer_config", remedy="use adamw")


def _check_access(given: types.LoadWeightsRequest) -> None:
    if given.weights_access_token is not None:
        what = "weights of others are read where they were published, and there are no tokens"
        raise ConfigError(what, where="weights_access_token", remedy="leave it out")


def _canonical(request: Message | pydantic.BaseModel) -> bytes:
    """The same bytes for the same request, whatever order its maps came in."""
    if isinstance(request, pydantic.BaseModel):
        return request.model_dump_json().encode()
    return request.SerializeToString(deterministic=True)
