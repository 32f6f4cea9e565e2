"""A worker of two processes: what is trained over it is what one process trains, and it samples too."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
from tinker import types

from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput
from tests.tinker.server.served import ints, serving

MODEL = "debug:llama"
TOKENS = [(7 * place + place * place) % 400 for place in range(24)]
FIELDS = {"target_tokens": TOKENS[1:], "weights": [1.0, 0.5] * 11 + [0.25]}


def test_two_processes_train_and_sample_as_one(tmp_path: Path) -> None:
    local = LocalTrainingClient(MODEL, LoraConfig(rank=4, seed=2), precision="fp32")
    datum = Datum(ModelInput.from_ints(TOKENS[:-1]), FIELDS)
    expected = []
    for _ in range(3):
        expected.append(local.forward_backward([datum, datum]).result().metrics["loss:sum"])
        local.optim_step(AdamParams(learning_rate=1e-2)).result()
    more = ("--precision", "fp32", "--nproc", "2", "--layout", "tp 2")
    with serving(MODEL, tmp_path / "server", *more) as served:
        service = served.client()
        client = service.create_lora_training_client(MODEL, rank=4, seed=2).result()
        data = [types.Datum(model_input=ints(TOKENS[:-1]), loss_fn_inputs=FIELDS)] * 2
        found = []
        for _ in range(3):
            found.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert found == pytest.approx(expected, rel=1e-5)
        sampler = client.save_weights_and_get_sampling_client().result()
        told = sampler.compute_logprobs(ints(TOKENS)).result()
        assert told[1:] == pytest.approx(local.compute_logprobs(TOKENS).result()[1:], abs=1e-4)
        with pytest.raises(tinker.RequestFailedError, match="several ranks"):
            client.save_weights_and_get_sampling_client(kind="inflight").result()
        again = service.create_training_client_from_state_with_optimizer(
            client.save_state("kept").result().path
        ).result()
        assert again.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(
            client.forward(data, "cross_entropy").result().metrics["loss:sum"], rel=1e-6
        )
