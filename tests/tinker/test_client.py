"""Oracle: plain Transformers and PEFT, document by document, losses from their formulas, torch.optim.AdamW."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from luthier.errors import ConfigError, DataError, ModelError, NonFiniteError, UserError
from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput, TensorData, merge_adapters
from tests.adapters.models import PEFT_WARNINGS, VOCABULARY, tiny
from tests.tinker.models import client_of, gradients, make_data, plain_gradients, plain_logprobs, plain_name, plain_twin

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")]

PolicyLoss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def ppo(now: torch.Tensor, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio, advantages = (now - fields["logprobs"]).exp(), fields["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def cispo(now: torch.Tensor, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    return -((now - fields["logprobs"]).exp().clamp(0, 4).detach() * now * fields["advantages"]).sum()


def gspo(now: torch.Tensor, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    mask, advantages = fields["sequence_ratio_mask"], fields["advantages"]
    mean = ((now.detach() - fields["logprobs"]) * mask).sum() / mask.sum()
    ratio = mean.exp() * (now - now.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


POLICIES: dict[str, PolicyLoss] = {
    "importance_sampling": lambda now, f: -((now - f["logprobs"]).exp() * f["advantages"]).sum(),
    "ppo": ppo,
    "cispo": cispo,
    "dro": lambda now, f: -(now * f["advantages"] - 0.025 * (now - f["logprobs"]) ** 2).sum(),
    "gspo": gspo,
}


CLIENTS: list[LocalTrainingClient] = []


def shared_client(tokens: int = 4096) -> LocalTrainingClient:
    """One client for tests that change no weight, its gradients cleared."""
    if not CLIENTS:
        CLIENTS.append(client_of())
    CLIENTS[0]._gradients.clear()
    CLIENTS[0]._tokens = tokens
    return CLIENTS[0]


def weighted(datum: Datum, now: torch.Tensor) -> torch.Tensor:
    return -(datum.loss_fn_inputs["weights"] * now).sum()


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Per tensor the largest difference over the largest entry, and the worst of these."""
    plain = {plain_name(name): value for name, value in theirs.items()}
    assert ours.keys() == plain.keys()
    return max(float((ours[name] - plain[name]).abs().max() / plain[name].abs().max()) for name in ours)


def data_of(name: str) -> list[Datum]:
    fields = {} if name == "cross_entropy" else {"logprobs": "logprobs", "advantages": "weights"}
    if name == "cross_entropy":
        fields["weights"] = "weights"
    if name == "gspo":
        fields["sequence_ratio_mask"] = "mask"
    return make_data(**fields)


@pytest.mark.parametrize("name", ["cross_entropy", *POLICIES])
def test_losses_and_gradients_are_those_of_a_plain_loop(name: str) -> None:
    client, data = shared_client(), data_of(name)
    twin = plain_twin(client)

    def loss(datum: Datum, now: torch.Tensor) -> torch.Tensor:
        fields: dict[str, Any] = dict(datum.loss_fn_inputs)
        return -(fields["weights"] * now).sum() if name == "cross_entropy" else POLICIES[name](now, fields)

    want, want_gradients = plain_gradients(twin, data, loss)
    before = client.forward(data, name).result()
    output = client.forward_backward(data, name).result()
    assert worst(gradients(client), want_gradients) < 1e-10
    for told in (before, output):
        assert told.metrics["loss:sum"] == pytest.approx(want, rel=1e-10)
        assert told.loss == told.metrics["loss:sum"]
        assert all(":" in key for key in told.metrics)
        for datum, found in zip(data, told.loss_fn_outputs, strict=True):  # weight 0 or not
            exact = plain_logprobs(twin, datum).detach()
            assert torch.allclose(found["logprobs"].to_torch(), exact, rtol=1e-10, atol=1e-12)


def test_soft_targets_beside_single_ones() -> None:
    client, data = shared_client(), make_data(weights="weights")
    generator = torch.Generator().manual_seed(5)
    for number, k in ((0, 3), (2, 2)):
        fields: Any = data[number].loss_fn_inputs
        length = len(fields["target_tokens"])
        fields["target_tokens"] = torch.randint(0, VOCABULARY, (length, k), generator=generator)
        fields["weights"] = torch.randn(length, k, generator=generator).double()
        fields["weights"][1] = 0
    twin = plain_twin(client)
    want, want_gradients = plain_gradients(twin, data, weighted)
    output = client.forward_backward(data).result()
    assert output.metrics["loss:sum"] == pytest.approx(want, rel=1e-10)
    assert worst(gradients(client), want_gradients) < 1e-10
    for datum, found in zip(data, output.loss_fn_outputs, strict=True):
        assert found["logprobs"].shape == list(datum.loss_fn_inputs["target_tokens"].shape)
        assert torch.allclose(found["logprobs"].to_torch(), plain_logprobs(twin, datum).detach(), rtol=1e-10)


@pytest.mark.parametrize("name", ["cross_entropy", "mean", *POLICIES])
def test_any_way_to_split_a_batch_gives_the_same(name: str) -> None:
    loss = "cross_entropy" if name == "mean" else name
    data = make_data() if name == "mean" else data_of(name)
    shared_client().forward_backward(data, loss).result()
    want = gradients(CLIENTS[0])
    for pieces, tokens in (([[0], [1], [2], [3], [4]], 4096), ([[3, 1], [4, 0, 2]], 4096), ([[0, 1, 2, 3, 4]], 13)):
        client = shared_client(tokens)
        for piece in pieces:
            client.forward_backward([data[number] for number in piece], loss).result()
        assert worst(gradients(client), want) < 1e-10


def test_calls_without_weights_are_one_mean_over_all_their_targets() -> None:
    """Rows of 300 and 100 tokens pull 0.75 and 0.25, in one call or two, whatever else is skipped."""
    data = make_data(lengths=(30, 10))
    shared_client().forward_backward(data[0]).result()
    left = gradients(CLIENTS[0])
    shared_client().forward_backward(data[1]).result()
    right = gradients(CLIENTS[0])
    want = {name: 0.75 * left[name] + 0.25 * right[name] for name in left}
    nothing = Datum(data[0].model_input, {"target_tokens": [-100] * 30})
    lonely = torch.tensor([5])
    client = shared_client()
    for call in ([nothing], [data[0]], lonely, [nothing, lonely, data[1]]):
        output = client.forward_backward(call).result()
        assert np.isfinite(output.loss)
    assert worst(gradients(client), want) < 1e-10
    assert output.metrics["tokens:sum"] == 10
    assert output.loss == pytest.approx(output.metrics["loss:sum"] / 10)
    empty = shared_client().forward_backward([nothing, lonely]).result()
    assert (empty.loss, empty.metrics["loss:sum"], empty.metrics["tokens:sum"]) == (0.0, 0.0, 0.0)


def test_sums_and_means_of_one_step_do_not_touch_each_other() -> None:
    sums, means = make_data(weights="weights"), make_data(1)
    found = []
    for calls in ([sums], [means], [means[:2], sums, means[2:]]):
        client = shared_client()
        for call in calls:
            client.forward_backward(call).result()
        client._gradients.add_up()
        found.append(gradients(client))
    left, right, both = found
    assert worst(both, {name: left[name] + right[name] for name in left}) < 1e-10


def test_steps_are_those_of_adamw() -> None:
    client = client_of(train_unembed=False)
    twin = plain_twin(client)
    trained = [p for p in twin.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(trained)
    steps = [AdamParams(), AdamParams(1e-2, 0.8, 0.9, 1e-6, 0.1), AdamParams(3e-3, 0.95, 0.99, 1e-8, 0.01, 0.5)]
    for number, adam in enumerate(steps):
        data = make_data(number, weights="weights")
        _, found = plain_gradients(twin, data, weighted)
        for name, parameter in twin.named_parameters():
            parameter.grad = found.get(name)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in found.values()]))
        if adam.grad_clip_norm:
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad *= min(1.0, adam.grad_clip_norm / float(norm))
        for group in theirs.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
            group["weight_decay"] = adam.weight_decay
        theirs.step()
        client.forward_backward(data).result()
        told = client.optim_step(None if number == 0 else adam).result()
        assert told.metrics["gradient_norm:mean"] == pytest.approx(float(norm), rel=1e-10)
        ours = {name: p.detach() for name, p in client.state.trainable.items()}
        assert worst(ours, {n: p.detach() for n, p in twin.named_parameters() if p.requires_grad}) < 1e-10
        assert gradients(client) == {}


def test_a_loss_of_ones_own_through_log_probabilities() -> None:
    """DPO-like, over pairs: the value couples rows, the oracle is autograd through the whole model."""
    client, data = shared_client(), make_data()[:4]

    def coupled(given: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margins = torch.stack([logprobs[i].sum() - logprobs[i + 1].mean() for i in (0, 2)])
        return -torch.nn.functional.logsigmoid(0.1 * margins).sum(), {"margin": 3.0, "rows:sum": float(len(given))}

    twin = plain_twin(client)
    given = [plain_logprobs(twin, datum) for datum in data]
    for now in given:
        now.retain_grad()
    want, _ = coupled(data, given)
    want.backward()
    theirs = {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}
    output = client.forward_backward_custom(data, coupled).result()
    assert worst(gradients(client), theirs) < 1e-10
    surrogate = output.metrics.pop("surrogate_loss:sum")  # of the weights that stand for the loss
    assert surrogate == pytest.approx(sum((now.detach() * now.grad).sum().item() for now in given), rel=1e-10)
    assert output.metrics == {"loss:sum": pytest.approx(want.item()), "margin": 3.0, "rows:sum": 4.0}
    with pytest.raises(UserError, match="loss_fn: it must return a scalar tensor"):
        client.forward_backward_custom(data, lambda given, logprobs: 1.0).result()


@pytest.mark.parametrize("metrics", [None, {"margin": "wide"}, {"margin": torch.ones(2)}, ["margin"]])
def test_metrics_that_are_none_leave_no_gradient_behind(metrics: Any) -> None:
    client = shared_client()
    with pytest.raises(UserError, match="loss_fn: its metrics are no mapping of names to numbers"):
        client.forward_backward_custom(make_data(), lambda given, logprobs: (logprobs[0].sum(), metrics)).result()
    assert gradients(client) == {}


@pytest.mark.parametrize(("loss", "config"), [(["ppo"], None), (None, None), ("ppo", [("beta", 1)]), ("ppo", "beta")])
def test_losses_and_settings_of_another_type_are_named(loss: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="loss_fn"):
        shared_client().forward_backward(make_data(), loss, config).result()


def test_every_form_of_data_is_the_same_row() -> None:
    ids = [3, 14, 15, 9, 26, 5]
    official = SimpleNamespace(
        model_input=SimpleNamespace(chunks=[SimpleNamespace(tokens=ids[:2]), SimpleNamespace(tokens=ids[2:-1])]),
        loss_fn_inputs={"target_tokens": SimpleNamespace(data=ids[1:], dtype="int64", shape=[5])},
    )
    forms: list[Any] = [
        torch.tensor(ids),
        torch.tensor([ids]),
        np.array(ids),
        ids,
        [ids],
        ModelInput.from_ints(ids),
        Datum(ModelInput.from_ints(ids)),
        Datum(ids[:-1], {"target_tokens": ids[1:]}),
        Datum(torch.tensor(ids[:-1]), {"target_tokens": TensorData(ids[1:])}),
        {"input_ids": torch.tensor([[*ids, 0]]), "attention_mask": torch.tensor([[1] * 6 + [0]])},
        {"input_ids": ids, "labels": [-100, *ids[1:]]},
        {"model_input": ModelInput.from_ints(ids), "loss_fn_inputs": {}},
        official,
        [official],
    ]
    found = [shared_client().forward_backward(form).result() for form in forms]
    assert {output.loss for output in found} == {found[0].loss}
    assert all(output.loss_fn_outputs[0]["logprobs"].shape == [5] for output in found)


def test_sparse_soft_targets_of_the_sdk_are_read() -> None:
    sparse = {
        "target_tokens": SimpleNamespace(
            data=[7, 8, 9], dtype="int64", shape=[2, 2], sparse_crow_indices=[0, 2, 3], sparse_col_indices=[0, 1, 0]
        ),
        "weights": SimpleNamespace(
            data=[0.5, 0.25, 1.0], dtype="float32", shape=[2, 2], sparse_crow_indices=[0, 2, 3],
            sparse_col_indices=[0, 1, 0],
        ),
    }  # fmt: skip
    dense = {"target_tokens": [[7, 8], [9, 0]], "weights": [[0.5, 0.25], [1.0, 0.0]]}
    one = shared_client().forward_backward(Datum([1, 2], sparse)).result()
    two = shared_client().forward_backward(Datum([1, 2], dense)).result()
    assert one.metrics["loss:sum"] == two.metrics["loss:sum"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "data: there is no row"),
        ([[1, 2], [1, VOCABULARY]], r"data\[1\].loss_fn_inputs.target_tokens: token 67 is not among the model's 67"),
        ([[1, 2], [-1, 2]], r"data\[1\].model_input: token -1"),
        ("text", "it is text"),
        ([1.5, 2.5], r"not whole numbers"),
        (Datum([1, 2], {"target_tokens": [3]}), "it has 1 values, and model_input has 2 tokens"),
        (Datum([1, 2], {"weights": [1.0, 1.0]}), "target_tokens is missing"),
        (Datum([1], {"target_tokens": [-100], "weights": [1.0]}), "a target of -100 has a weight"),
        (Datum([1], {"target_tokens": [2], "weights": [float("nan")]}), "weights: value 0 is nan"),
        ([Datum([1], {"target_tokens": [2], "weights": [1]}), [1, 2]], r"data\[1\].*: weights are missing"),
        (Datum([1], {"target_tokens": [True]}), "target_tokens: token ids are whole numbers"),
        (Datum([1], {"target_tokens": np.array([2**64 - 1], np.uint64)}), "target_tokens: token -1 is not among"),
        (Datum([1], {"target_tokens": [2], "weights": [1j]}), "weights: it is torch.complex128; give real numbers"),
        (Datum([1], {"target_tokens": np.zeros((1, 0), int)}), r"target_tokens: it is \[1, 0\]: nothing for a token"),
        (Datum([1], {"target_tokens": np.zeros((1, 0), int), "weights": np.zeros((1, 0))}), "nothing for a token"),
        ({"input_ids": [1, 2], "labels": [1.5, 2.5]}, "target_tokens: token ids are whole numbers"),
        ([[1], [1] * 70], r"data\[1\]: 69 tokens are more than the 64 positions that the model has; shorten it"),
        ({"input_ids": [1, 2], "token_type_ids": [0, 0]}, "there is no use for token_type_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, r"data.labels: it is \[1, 1\], and input_ids are \[1, 2\]"),
        (SimpleNamespace(chunks=[SimpleNamespace(data=b"", format="png")]), "a SimpleNamespace is no text"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_is_named(data: Any, told: str) -> None:
    client = shared_client()
    with pytest.raises(DataError, match=told):
        client.forward_backward(data).result()
    with pytest.raises(DataError, match=told):
        client.forward(data).result()
    assert gradients(client) == {}


def test_a_failure_that_nobody_saw_stops_the_step() -> None:
    client, data = client_of(), make_data(weights="weights")
    before = copy.deepcopy({name: p.detach() for name, p in client.state.trainable.items()})
    client.forward_backward(data)
    client.forward_backward([Datum([1], {"target_tokens": [2], "weights": [float("nan")]})])
    with pytest.raises(
        UserError, match=r"a call of forward_backward failed \(.*value 0 is nan.*\), so this step is not"
    ):
        client.optim_step().result()
    assert all(torch.equal(before[name], p) for name, p in client.state.trainable.items())
    client.forward_backward(data).result()
    with pytest.raises(DataError):
        client.forward_backward("text").result()  # seen, and nothing was added
    client.optim_step().result()
    assert not all(torch.equal(before[name], p) for name, p in client.state.trainable.items())


def test_a_fault_in_the_middle_of_a_call_is_raised_at_once_and_stops_the_step() -> None:
    client, data = client_of(), make_data(weights="weights")
    client.forward_backward(data)

    def fail(*_: Any) -> None:
        raise OSError("no device")

    handle = client.model.get_input_embeddings().register_forward_hook(fail)
    with pytest.raises(OSError, match="no device"):
        client.forward_backward(data)
    handle.remove()
    assert gradients(client) == {}
    with pytest.raises(UserError, match="a call of forward_backward failed"):
        client.optim_step().result()
    client.forward_backward(data)
    client.optim_step().result()


def test_numbers_that_are_not_finite_change_nothing() -> None:
    client, data = client_of(), make_data(weights="weights")
    before = copy.deepcopy({name: p.detach() for name, p in client.state.trainable.items()})
    client.forward_backward(data).result()
    next(iter(client.state.trainable.values())).grad.fill_(float("inf"))  # type: ignore[union-attr]
    with pytest.raises(
        NonFiniteError, match="the gradient norm is inf, the first gradient that is not finite is that of"
    ):
        client.optim_step().result()
    assert all(torch.equal(before[name], p) for name, p in client.state.trainable.items())
    bads: list[dict[str, float]] = [{"learning_rate": -1.0}, {"beta1": 1.0}, {"eps": 0.0}, {"grad_clip_norm": np.nan}]
    bads += [{"eps": 1e-46}, {"learning_rate": 1e39}, {"weight_decay": 1e300}]  # 0 and infinite in the weights' fp32
    for bad in bads:
        with pytest.raises(UserError, match=f"adam_params.{next(iter(bad))}"):
            client.optim_step(AdamParams(**bad)).result()


def test_two_clients_go_their_own_ways() -> None:
    """Over one base model, interleaved, each is bit for bit what it is alone."""
    from luthier.adapters import beside
    from luthier.tinker import apply_lora

    def run(clients: list[LocalTrainingClient]) -> list[dict[str, torch.Tensor]]:
        for step in range(3):
            for client in clients:
                client.forward_backward(make_data(step + 10 * client.state.lora.ranks[0], weights="weights"))
            for client in clients:
                client.optim_step(AdamParams(learning_rate=1e-2)).result()
        return [{name: p.detach().clone() for name, p in client.state.trainable.items()} for client in clients]

    def pair() -> list[Any]:
        first = tiny("llama", torch.float32)
        apply_lora(first, LoraConfig(rank=4))
        second = beside(first)
        apply_lora(second, LoraConfig(rank=2, train_mlp=False, seed=1))
        return [first, second]

    first, second = pair()
    assert first.model.embed_tokens.weight is second.model.embed_tokens.weight
    assert first.model.layers[0].mlp.up_proj.weight is second.model.layers[0].mlp.up_proj.weight
    together = run([LocalTrainingClient(first), LocalTrainingClient(second)])
    for number in range(2):
        alone = run([LocalTrainingClient(pair()[number])])[0]
        assert alone.keys() == together[number].keys()
        assert all(torch.equal(alone[name], together[number][name]) for name in alone)


def test_compute_logprobs_is_the_trainers_forward() -> None:
    client = shared_client()
    ids = [3, 14, 15, 9, 26]
    found = client.compute_logprobs(ModelInput.from_ints(ids)).result()
    exact = client.forward(ids).result().loss_fn_outputs[0]["logprobs"].tolist()
    assert found == [None, *exact]
    several = client.compute_logprobs([ModelInput.from_ints(ids), ModelInput.from_ints([7])]).result()
    assert several == [found, [None]]


def test_futures_may_be_awaited() -> None:
    client = client_of()

    async def loop() -> float:
        first = client.forward_backward(make_data())
        step = client.optim_step()
        await step
        return (await first).loss + (await first.result_async()).loss

    assert asyncio.run(loop()) > 0
    assert client.forward([1, 2]).future().result().loss > 0


def test_after_merging_no_step_is_taken() -> None:
    client = client_of(train_unembed=False)
    ids = torch.tensor([[3, 14, 15, 9]])
    with torch.no_grad():
        before = client.model(input_ids=ids, use_cache=False).logits
        assert merge_adapters(client.model).layers == 8
        after = client.model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(before, after, rtol=1e-10)
    with pytest.raises(ModelError, match="its adapters were merged into its weights"):
        client.forward_backward(make_data()).result()
    with pytest.raises(ModelError, match="merged"):
        client.optim_step().result()
    with pytest.raises(ModelError, match="merged"):
        LocalTrainingClient(client.model)


def test_a_model_without_adapters_trains_whole() -> None:
    client, data = LocalTrainingClient(tiny("qwen3-tied")), make_data(weights="weights")
    twin = tiny("qwen3-tied")
    want, theirs = plain_gradients(twin, data, weighted)
    assert client.forward_backward(data).result().loss == pytest.approx(want, rel=1e-10)
    assert worst(gradients(client), theirs) < 1e-6  # qwen3 rounds to fp32 inside
