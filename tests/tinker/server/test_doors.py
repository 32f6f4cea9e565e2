"""Over HTTP the weights are those of the same loop in process, and no client's depend on another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from tinker.types.generic_event import GenericEvent
from tinker.types.telemetry_response import TelemetryResponse
from tinker.types.telemetry_send_request import TelemetrySendRequest

from luthier.config import RunConfig
from luthier.recipes.run import opened
from luthier.tinker import AdamParams, LocalTrainingClient, LoraConfig
from luthier.tinker.saved import save_for_sampler
from tests.tinker.server.served import KEY, Served, ints, serving
from tests.tinker.test_recipe import DATA, datums_of

MODEL = "debug:llama"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(MODEL, tmp_path_factory.mktemp("doors") / "server", "--precision", "fp32") as found:
        yield found


def weights_of(served: Served, client: tinker.TrainingClient, name: str = "end") -> dict[str, torch.Tensor]:
    """What a client has learnt, from the server's own files."""
    run = client.save_weights_external(name).result().path.removeprefix("tinker://").split("/")[0]
    directory = served.directory / "checkpoints" / run.replace(":", "_") / "external_weights" / name
    return load_file(directory / "adapter_model.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert all(value.any() for value in expected.values())  # B is no longer zero


def test_the_recipes_batches_give_the_recipes_weights(served: Served, tmp_path: Path) -> None:
    """In process they do (test_recipe.py); so do they over HTTP."""
    config = RunConfig.model_validate(
        {
            "model": MODEL,
            "data": {"train": str(DATA), "sequence_length": 128},
            "adapter": {"rank": 4, "alpha": 32},
            "train": {"steps": 3, "rows_per_step": 4, "precision": "fp32"},
            "output": str(tmp_path / "run"),
        }
    )
    local = LocalTrainingClient(MODEL, LoraConfig(rank=4, train_unembed=False), precision="fp32")
    remote = served.client().create_lora_training_client(MODEL, rank=4, seed=0, train_unembed=False).result()
    with opened(config, "never") as run:
        batches = [[datums_of(one, batch.total_weight) for one in batch.microbatches] for batch in run.loader]
    for batch in batches:
        for data in batch:
            ours = local.forward_backward(data).result()
            theirs = remote.forward_backward([_sdk(one) for one in data], "cross_entropy").result()
            assert theirs.metrics["loss:sum"] == ours.metrics["loss:sum"]
        step = {"learning_rate": 1e-2, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.5}
        ours = local.optim_step(AdamParams(**step)).result()
        assert remote.optim_step(types.AdamParams(**step)).result().metrics == ours.metrics
    save_for_sampler(local.state, tmp_path / "local")
    assert_equal(weights_of(served, remote), load_file(tmp_path / "local" / "adapter_model.safetensors"))


def _sdk(datum: Any) -> types.Datum:
    """The SDK's own, which sends a float64 as fp32 and no -100: that target has no weight."""
    fields = datum.loss_fn_inputs
    return types.Datum(
        model_input=ints(datum.model_input.tolist()),
        loss_fn_inputs={key: types.TensorData.from_torch(value) for key, value in fields.items()},
    )


def test_interleaved_clients_learn_what_each_learns_alone(served: Served) -> None:
    service = served.client()

    def client(number: int) -> tinker.TrainingClient:
        return service.create_lora_training_client(MODEL, rank=2 + number, seed=number, train_mlp=number == 0).result()

    def send(one: tinker.TrainingClient, number: int, step: int) -> list[Any]:
        tokens = [(7 * step + 13 * number + place * place) % 400 for place in range(9)]
        fields = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        data = [types.Datum(model_input=ints(tokens[:-1]), loss_fn_inputs=fields)]
        adam = types.AdamParams(learning_rate=1e-2 * (1 + number), grad_clip_norm=0.1 * number)
        return [one.forward_backward(data, "cross_entropy"), one.optim_step(adam)]

    together = [client(0), client(1)]
    waiting = [call for step in range(4) for number in (0, 1) for call in send(together[number], number, step)]
    for call in waiting:
        call.result()
    for number in (0, 1):
        alone = client(number)
        for step in range(4):
            for call in send(alone, number, step):
                call.result()
        assert_equal(weights_of(served, together[number]), weights_of(served, alone))


def test_all_weights_may_train(served: Served) -> None:
    client = served.client().create_lora_training_client(MODEL, user_metadata={"luthier.train": "full"}).result()
    local = LocalTrainingClient(MODEL, precision="fp32")
    assert client.get_info().is_lora is False
    tokens = list(range(3, 20))
    fields = {"target_tokens": tokens[1:], "weights": [0.1] * 16}
    data = [types.Datum(model_input=ints(tokens[:-1]), loss_fn_inputs=fields)]
    for one, adam in ((client, types.AdamParams), (local, AdamParams)):
        one.forward_backward(data, "cross_entropy").result()
        one.optim_step(adam(learning_rate=1e-3)).result()
    path = client.save_state("whole").result().path
    again = served.client().create_training_client_from_state(path).result()
    sampler = again.save_weights_and_get_sampling_client().result()
    told = sampler.compute_logprobs(ints(tokens)).result()
    assert told[1:] == pytest.approx(local.compute_logprobs(tokens).result()[1:], abs=1e-5)


def test_the_sdks_command_line_fetches_adapters(served: Served, tmp_path: Path) -> None:
    """It makes a model of the checkpoint, saves that to be fetched, follows the links without a key, and cleans up."""
    client = served.client().create_lora_training_client(MODEL, rank=3, seed=7).result()
    path = client.save_state("kept").result().path
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path / "files")]
    told = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": KEY}
    ended = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = next((tmp_path / "files").rglob("adapter_model.safetensors"))
    expected = weights_of(served, client)
    fetched = load_file(found)
    assert fetched.keys() == expected.keys()
    assert all(torch.equal(fetched[key], value) for key, value in expected.items())


def test_what_the_sdk_reports_of_itself_is_accepted(served: Served) -> None:
    event = GenericEvent(
        event="GENERIC_EVENT",
        event_id="1",
        event_session_index=0,
        severity="INFO",
        timestamp=datetime.now(UTC),
        event_name="x",
        event_data={},
    )
    sent = TelemetrySendRequest(
        events=[event], platform="linux", sdk_version="0.38.0", session_id="1", process_uuid="2"
    )
    answer = httpx.post(f"{served.url}/api/v1/telemetry", content=sent.model_dump_json(), headers={"X-API-Key": KEY})
    assert TelemetryResponse.model_validate_json(answer.content).status == "accepted"
