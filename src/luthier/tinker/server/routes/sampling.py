"""Samplers and samples."""

from __future__ import annotations

import random
import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Response
from tinker import types

from luthier.errors import ConfigError
from luthier.tinker.server.http import Owner, TheService, answer, digest, taking
from luthier.tinker.server.records import Operation, Sampler
from luthier.tinker.server.routes.sessions import living
from luthier.tinker.server.service import Service, Unknown

MOST_SAMPLES = 1024
"""Of one request."""
router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: TheService,
    owner: Owner,
    given: Annotated[types.CreateSamplingSessionRequest, taking(types.CreateSamplingSessionRequest)],
) -> Response:
    """A sampler of the base model or of weights with a name."""
    living(service, given.session_id, owner)
    sampler = _sampler(service, owner, given)
    earlier = service.samplers.records.get(sampler.id)
    if earlier is None:
        await service.samplers.create(sampler)
    elif (earlier.base_model, earlier.model_path) != (sampler.base_model, sampler.model_path):
        raise ConfigError("another sampler has it", where="sampling_session_seq_id", remedy="count on")
    return answer({"sampling_session_id": sampler.id, "type": "create_sampling_session"})


@router.get("/samplers/{sampler_id}")
async def get_sampler(service: TheService, owner: Owner, sampler_id: str) -> Response:
    """What a sampler samples from."""
    sampler = _owned(service, sampler_id, owner)
    told = {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}
    return answer(told)


@router.post("/asample")
async def asample(
    service: TheService, owner: Owner, given: Annotated[types.SampleRequest, taking(types.SampleRequest)]
) -> Response:
    """Texts that go on with a prompt."""
    if given.sampling_session_id is None or given.seq_id is None:
        remedy = "make a sampling session first, as SDK 0.38 does"
        raise ConfigError("sampling_session_id and seq_id are missing", where="body", remedy=remedy)
    sampler = _owned(service, given.sampling_session_id, owner)
    living(service, sampler.session_id, owner)
    _check(given)
    sent = given.model_dump_json().encode()
    operation = Operation(
        f"{sampler.id}:{given.seq_id}",
        owner,
        sampler.session_id,
        sampler.id,
        given.seq_id,
        "sample",
        {"seed": random.getrandbits(62)},  # so that a sample that is made again is the same one
        digest(sent),
        time.time(),
    )
    found = await service.submit(operation, sent)
    sequences = [f"{found.id}:{number}" for number in range(given.num_samples)]
    return answer({"request_id": found.id, "sample_sequence_ids": sequences})


def _check(given: types.SampleRequest) -> None:
    if given.seq_id is None or not 0 <= given.seq_id < 1 << 62:
        raise HTTPException(422, "seq_id: it is no whole number of 0 or more")
    if not 1 <= given.num_samples <= MOST_SAMPLES:
        raise ConfigError(
            f"{given.num_samples} is no number of texts", where="num_samples", remedy=f"give 1 to {MOST_SAMPLES}"
        )
    for field, asked, remedy in (
        (
            "target_prompt_logprobs",
            given.target_prompt_logprobs is not None,
            "topk_prompt_logprobs tells the likeliest",
        ),
        ("prompt_alt_tokens_k", given.prompt_alt_tokens_k != 0, "sample with max_tokens=1 instead"),
        ("record_stability_info", bool(given.record_stability_info), "train with another loss than stable_reinforce"),
    ):
        if asked:
            raise ConfigError("it is not here", where=field, remedy=remedy)
    if odd := next((chunk for chunk in given.prompt.chunks if not isinstance(chunk, types.EncodedTextChunk)), None):
        raise ConfigError(f"a chunk of {odd.type} is no text", where="prompt", remedy="give token ids alone")
    last, length = given.prompt_logprobs_last_n, given.prompt.length
    if last is not None and not (given.prompt_logprobs and 1 <= last < max(length, 2)):
        remedy = "ask for prompt_logprobs, and for fewer than the prompt has tokens"
        raise ConfigError(f"{last} cannot be had", where="prompt_logprobs_last_n", remedy=remedy)


def _sampler(service: Service, owner: str, given: types.CreateSamplingSessionRequest) -> Sampler:
    number = given.sampling_session_seq_id
    if not 0 <= number < 1 << 62:
        raise HTTPException(422, "sampling_session_seq_id: it is no whole number of 0 or more")
    base, directory = given.base_model, None
    if given.model_path is not None:
        checkpoint = service.checkpoint(given.model_path, owner, "sampler_weights")
        directory = str(service.files.checkpoint(checkpoint.model_id, "sampler_weights", checkpoint.name))
        base = base or service.models[checkpoint.model_id].base_model
    if base is None:
        raise ConfigError("neither base_model nor model_path is there", where="body")
    if base not in service.names:
        remedy = f"this server has {service.names[0]}; start another for another model"
        raise ConfigError(f"{base!r} is not here", where="base_model", remedy=remedy)
    identity = f"{given.session_id}:sample:{number}"
    return Sampler(identity, owner, given.session_id, base, given.model_path, directory, None, time.time())


def _owned(service: Service, sampler_id: str, owner: str) -> Sampler:
    sampler = service.samplers.records.get(sampler_id)
    if sampler is None or sampler.owner != owner:
        raise Unknown
    return sampler
