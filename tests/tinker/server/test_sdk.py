"""The official SDK, unmodified, against `luthier serve` on SmolLM2-135M, beside Transformers and PEFT."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tinker.server.served import Served, ints, serving

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def served(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(smollm2, tmp_path_factory.mktemp("serve") / "server", "--precision", "fp32") as found:
        yield found


@pytest.fixture(scope="module")
def service(served: Served) -> tinker.ServiceClient:
    return served.client()


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient, smollm2: str) -> tinker.TrainingClient:
    """A client that has taken two steps; no test below takes another with it."""
    client = service.create_lora_training_client(smollm2, rank=4, seed=3).result()
    for _ in range(2):
        client.forward_backward([datum(7, 9)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return client


def datum(seed: int, length: int) -> types.Datum:
    """Random tokens, the next one the target, the first of weight 0."""
    tokens = np.random.default_rng(seed).integers(100, 40_000, length + 1)
    weights = np.ones(length, np.float32)
    weights[0] = 0
    fields = {"target_tokens": tokens[1:].tolist(), "weights": weights.tolist()}
    return types.Datum(model_input=ints(tokens[:-1].tolist()), loss_fn_inputs=fields)


def logprobs_of(model: Any, data: list[types.Datum]) -> list[torch.Tensor]:
    """By unmodified modules, each document alone."""
    found = []
    for one in data:
        ids = torch.tensor([one.model_input.to_ints()])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        targets = one.loss_fn_inputs["target_tokens"].to_torch().long()
        found.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    return found


@pytest.mark.parametrize("rows", [1, 7, pytest.param(1500, marks=pytest.mark.soak)])
def test_forward_backward_tells_what_transformers_computes(
    service: tinker.ServiceClient, smollm2: str, plain: Any, rows: int
) -> None:
    client = service.create_lora_training_client(smollm2, rank=2, train_unembed=False).result()
    data = [datum(number, 2) for number in range(rows)]
    output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == rows
    checked = [0, rows // 2, rows - 1]  # the first, and both sides of where the SDK cuts a call in two
    told = [output.loss_fn_outputs[number]["logprobs"].to_torch() for number in checked]
    for found, expected in zip(told, logprobs_of(plain, [data[number] for number in checked]), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    total = -sum(float(one["logprobs"].to_torch()[1:].double().sum()) for one in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_a_step_is_the_one_of_peft_and_torch(
    served: Served, service: tinker.ServiceClient, smollm2: str, plain: Any, tmp_path: Path
) -> None:
    client = service.create_lora_training_client(smollm2, rank=2, seed=5, train_unembed=False).result()
    data = [datum(1, 6), datum(2, 4)]
    start = fetch(client, served, tmp_path / "start")
    client.forward_backward(data[:1], "cross_entropy")
    client.forward_backward(data[1:], "cross_entropy")
    adam = types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, grad_clip_norm=0.5)
    norm = client.optim_step(adam).result().metrics["gradient_norm:mean"]
    end = fetch(client, served, tmp_path / "end")
    model = adapted(plain, start)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0)
    for one in data:
        ids = torch.tensor([one.model_input.to_ints()])
        targets = one.loss_fn_inputs["target_tokens"].to_torch().long()
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        (-(logprobs * one.loss_fn_inputs["weights"].to_torch()).sum()).backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    optimizer.step()
    assert norm == pytest.approx(float(expected_norm), rel=1e-3)
    for name, parameter in adapted(plain, end).named_parameters():
        if name in weights:
            torch.testing.assert_close(parameter, weights[name], atol=5e-4, rtol=0, msg=name)


def adapted(plain: Any, directory: Path) -> Any:
    """PEFT's model of a copy of the base, with adapters from files, which train."""
    base = AutoModelForCausalLM.from_config(plain.config, dtype=torch.float32)
    base.load_state_dict(plain.state_dict())
    return peft.PeftModel.from_pretrained(base, directory, is_trainable=True)


def fetch(client: tinker.TrainingClient, served: Served, directory: Path) -> Path:
    """Files of a client's adapters, by links and without a key, as the SDK's command line fetches them."""
    path = client.save_weights_external(directory.name).result().path
    links = served.rest().get_external_weights_urls(path).result()
    directory.mkdir()
    for name, url in links.urls.items():
        with urllib.request.urlopen(url) as response:
            (directory / name).write_bytes(response.read())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(links.urls)
    return directory


def test_state_comes_back_with_and_without_its_optimizer(
    service: tinker.ServiceClient, smollm2: str, trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("whole").result().path
    same = service.create_training_client_from_state_with_optimizer(path).result()
    bare = service.create_training_client_from_state(path).result()
    data = [datum(11, 8)]
    first = [one.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data for one in (same, bare)]
    assert first[0] == first[1] == trained.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    after = []
    for one in (same, bare):
        one.forward_backward(data, "cross_entropy")
        one.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        after.append(one.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    assert after[0] != after[1]  # moments were there, or were not
    info = same.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, smollm2)


def test_a_name_is_taken_once_unless_it_is_to_be_replaced(trained: tinker.TrainingClient) -> None:
    trained.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="already"):
        trained.save_state("twice").result()
    trained.save_state("twice", overwrite=True).result()


def test_a_sampler_stays_as_it_was_when_training_goes_on(
    service: tinker.ServiceClient, smollm2: str, tokenizer: Any
) -> None:
    client = service.create_lora_training_client(smollm2, rank=2, seed=1).result()
    named = service.create_sampling_client(model_path=client.save_weights_for_sampler("early").result().path).result()
    nameless = client.save_weights_and_get_sampling_client().result()
    live = client.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = ints(tokenizer(PROMPT).input_ids)
    before = [sampler.compute_logprobs(prompt).result() for sampler in (named, nameless, live)]
    assert before[0] == before[1] == before[2]
    client.forward_backward([datum(4, 12)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = [sampler.compute_logprobs(prompt).result() for sampler in (named, nameless, live)]
    assert after[0] == after[1] == before[0]
    assert after[2] != before[0]


def test_samples_are_those_of_transformers(
    service: tinker.ServiceClient, smollm2: str, plain: Any, tokenizer: Any
) -> None:
    sampler = service.create_sampling_client(base_model=smollm2).result()
    ids = tokenizer(PROMPT).input_ids
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    found = sampler.sample(ints(ids), 1, greedy, topk_sample_logprobs=3).result().sequences[0]
    expected = plain.generate(
        torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(ids) :]
    assert found.tokens == expected.tolist()
    with torch.no_grad():
        logits = plain(torch.tensor([[*ids, *found.tokens]])).logits[0, len(ids) - 1 : -1]
    table = logits.log_softmax(-1).topk(3)
    told = found.topk_logprobs_np
    np.testing.assert_array_equal(told.token_ids, table.indices)
    np.testing.assert_allclose(told.logprobs, table.values, atol=2e-4)
    np.testing.assert_allclose(found.logprobs, table.values[:, 0], atol=2e-4)


def test_four_samples_by_seed_and_stop_strings(service: tinker.ServiceClient, smollm2: str, tokenizer: Any) -> None:
    sampler = service.create_sampling_client(base_model=smollm2).result()
    prompt = ints(tokenizer(PROMPT).input_ids)

    def texts(seed: int, **more: Any) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=10, seed=seed, **more)
        return [list(one.tokens) for one in sampler.sample(prompt, 4, params).result().sequences]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len({tuple(text) for text in texts(1)}) == 4
    stopped = (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=40, temperature=0.0, stop=[" is", "."]))
        .result()
        .sequences[0]
    )
    assert stopped.stop_reason == "stop"
    text = tokenizer.decode(stopped.tokens)
    assert text.endswith((" is", "."))
    assert "." not in text[:-1]
    only = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=9, temperature=0.0, stop=[stopped.tokens[0]]))
    assert list(only.result().sequences[0].tokens) == [stopped.tokens[0]]


def test_log_probabilities_of_a_prompt(service: tinker.ServiceClient, smollm2: str, plain: Any, tokenizer: Any) -> None:
    sampler = service.create_sampling_client(base_model=smollm2).result()
    ids = tokenizer(PROMPT).input_ids
    told = sampler.compute_logprobs(ints(ids)).result()
    with torch.no_grad():
        table = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert told[0] is None
    expected = table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(told[1:], expected, atol=2e-4)
    some = sampler.sample(
        ints(ids),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=2,
    ).result()
    assert some.prompt_logprobs[:-2] == [None] * (len(ids) - 2)
    assert some.prompt_logprobs[-2:] == told[-2:]
    assert [token for token, _ in some.topk_prompt_logprobs[-1]] == table[-2].topk(2).indices.tolist()


def test_a_loss_of_ones_own_is_the_named_one(service: tinker.ServiceClient, smollm2: str) -> None:
    data = [datum(21, 5), datum(22, 3)]

    def loss(given: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in given]
        return -sum((weight * one).sum() for weight, one in zip(weights, logprobs, strict=True)), {
            "rows": float(len(given))
        }

    steps: list[Callable[[tinker.TrainingClient], Any]] = [
        lambda client: client.forward_backward(data, "cross_entropy"),
        lambda client: client.forward_backward_custom(data, loss),
    ]
    after = []
    for call in steps:
        client = service.create_lora_training_client(smollm2, rank=2, seed=9).result()
        metrics = call(client).result().metrics
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        after.append(client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    assert metrics["rows"] == 2.0
    np.testing.assert_array_equal(*after)


def test_checkpoints_are_listed_and_deleted(
    served: Served, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    rest = served.rest()
    run = trained.get_info().model_id
    path = trained.save_state("doomed", ttl_seconds=3600, user_metadata={"step": "2"}).result().path
    listed = {one.tinker_path: one for one in rest.list_checkpoints(run).result().checkpoints}
    assert (listed[path].checkpoint_type, listed[path].user_metadata) == ("training", {"step": "2"})
    assert listed[path].expires_at - listed[path].time < timedelta(seconds=3601)
    assert path in {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == run
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in {one.tinker_path for one in rest.list_checkpoints(run).result().checkpoints}
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state(path).result().get_info()


def test_what_is_not_here_is_refused_by_name(trained: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="stable_reinforce"):
        trained.forward_backward([datum(1, 3)], "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match="not taken"):  # nothing is stepped on by halves
        trained.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.RequestFailedError, match="49,152"):
        trained.forward(
            [types.Datum(model_input=ints([99_999]), loss_fn_inputs={"target_tokens": [1]})], "cross_entropy"
        ).result()


def test_a_session_ends(served: Served, smollm2: str) -> None:
    with served.client() as service:
        client = service.create_lora_training_client(smollm2, rank=1).result()
        client.forward([datum(1, 3)], "cross_entropy").result()
    rest = served.rest()
    assert client.get_info().model_id in {
        run.training_run_id for run in rest.list_training_runs().result().training_runs
    }
