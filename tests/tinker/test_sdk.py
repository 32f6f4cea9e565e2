"""Oracle: the official SDK's own classes: their methods and parameters, and its objects given to ours."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from luthier.errors import UserError
from luthier.tinker import LocalTrainingClient, SamplingClient
from tests.tinker.models import client_of

ELSEWHERE = {"get_console_url", "get_telemetry", "holder", "from_sampler_handle", "get_sampler_handle", "create"}
"""What has no meaning in one process: the console, telemetry, handles for other processes."""
LEFT_OUT = {"save_weights_external", "save_weights_external_async", "on_queue_state_change"} | ELSEWHERE
UNUSED = {"weights_access_token", "loss_type_input"}


def public(cls: type) -> dict[str, Any]:
    return {name: call for name, call in inspect.getmembers(cls, callable) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("theirs", "ours"), [(tinker.TrainingClient, LocalTrainingClient), (tinker.SamplingClient, SamplingClient)]
)
def test_every_call_of_the_sdk_is_there_with_its_parameters_in_its_order(theirs: type, ours: type) -> None:
    missing = public(theirs).keys() - public(ours).keys() - LEFT_OUT
    assert missing == set()
    for name, call in public(theirs).items():
        if name in LEFT_OUT:
            continue
        wanted = [key for key in inspect.signature(call).parameters if key not in UNUSED]
        assert [*inspect.signature(getattr(ours, name)).parameters][: len(wanted)] == wanted, name


def test_a_loop_with_the_sdks_objects_and_its_async_calls(tmp_path: Path) -> None:
    client = client_of("llama", torch.float32, directory=tmp_path)
    prompt = types.ModelInput.from_ints([3, 14, 15, 9])
    datum = types.Datum(
        model_input=prompt, loss_fn_inputs={"target_tokens": [14, 15, 9, 2], "weights": [0.0, 1.0, 1.0, 0.5]}
    )
    greedy = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])

    async def loop() -> tuple[list[int], list[int]]:
        first = await client.forward_backward_async([datum], "cross_entropy")
        step = await client.optim_step_async(types.AdamParams(learning_rate=1e-2))
        assert (await first).loss_fn_outputs[0]["logprobs"].to_torch().shape == (4,)
        await step.result_async()
        path = (await (await client.save_weights_for_sampler_async("one"))).path
        assert Path(path) == tmp_path / "sampler_weights" / "one"
        live = await client.save_weights_and_get_sampling_client_async()
        read = await client.create_sampling_client_async("one")
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(adam_params=types.AdamParams(learning_rate=1e-1)).result()
        texts = [(await one.sample_async(prompt, 1, greedy)).sequences[0].tokens for one in (live, read)]
        return texts[0], texts[1]

    live, read = asyncio.run(loop())
    assert live == read
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.arch) == (True, 4, "llama")
    assert client.create_sampling_client("one").result().get_base_model() == info.model_name == client.model_id


def test_parts_of_a_prompt_are_scored_or_refused_by_name() -> None:
    client = client_of("llama", torch.float32)
    sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()
    ids = [3, 14, 15, 9]
    whole = sampler.compute_logprobs(ids).result()
    assert sampler.compute_logprobs(ids, 2).result() == [None, None, *whole[2:]]
    params = types.SamplingParams(max_tokens=1, seed=0)
    found = sampler.sample(ids, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=1).result()
    assert found.prompt_logprobs == [None, None, None, whole[3]]
    assert len(found.sequences[0].tokens_np) == len(found.sequences[0].logprobs_np) == 1
    for options, told in (
        ({"prompt_logprobs_last_n": 4, "include_prompt_logprobs": True}, "prompt_logprobs_last_n: 4 is no number"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: there is no such thing here"),
        ({"target_prompt_logprobs": [[1]]}, "target_prompt_logprobs: there is no such thing here"),
    ):
        with pytest.raises(UserError, match=told):
            sampler.sample(ids, 1, params, **options).result()
    with pytest.raises(UserError, match="record_stability_info: it is for stable_reinforce"):
        client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    with pytest.raises(UserError, match="loss_fn: a str cannot be called"):
        client.forward_backward_custom([[1, 2]], "mine").result()  # type: ignore[arg-type]
