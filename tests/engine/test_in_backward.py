"""Weights updated while gradients are made: the same numbers, fewer gradients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig, RunConfig
from luthier.config.sections import AdamWConfig, OptimizerConfig, SGDConfig, StochasticAdamWConfig
from luthier.engine.build import build_state
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step, set_learning_rate
from luthier.errors import ConfigError, NonFiniteError
from luthier.hf.source import resolve
from luthier.optim.in_backward import InBackward
from luthier.parallel.norm import square
from tests.estimate.watch import Watch
from tests.oracles.rows import documents
from tests.parallel.cases import weights_after
from tests.world import World

CASES: dict[str, tuple[OptimizerConfig, dict[str, Any]]] = {
    "adamw": (AdamWConfig(weight_decay=0.1), {}),
    "sgd": (SGDConfig(name="sgd", learning_rate=0.1), {}),
    "bf16": (AdamWConfig(), {"precision": "bf16"}),
    "lora": (AdamWConfig(), {"adapter": LoraConfig(rank=4)}),
    "tied": (AdamWConfig(), {"model": "debug:gemma2"}),
    "recomputed": (AdamWConfig(), {"activation_checkpointing": "full"}),
}


def made(optimizer: OptimizerConfig, how: dict[str, Any], *, early: bool) -> TrainState:
    how = {"adapter": None, "precision": "fp32", **how}
    source = resolve(how.pop("model", "debug:llama"))
    return build_state(source, optimizer=optimizer.model_copy(update={"in_backward": early}), **how)


def steps(state: TrainState, count: int, microbatches: int = 1, rows: Sequence[Sample] | None = None) -> list[float]:
    rows, norms = documents() if rows is None else rows, []
    for _ in range(count):
        batches = [Batch.pack(rows[number::microbatches]).scaled(1 / 100) for number in range(microbatches)]
        set_learning_rate(state, 0.5)
        outputs = forward_backward_all(state, batches)
        loss = float(sum(output.loss for output in outputs))
        norms.append(optim_step(state, loss=loss, learning_rate_factor=0.5).gradient_norm)
    return norms


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_same_weights_to_the_bit(case: str, microbatches: int) -> None:
    late, early = (made(*CASES[case], early=early) for early in (False, True))
    expected, found = steps(late, 3, microbatches), steps(early, 3, microbatches)
    assert found == pytest.approx(expected, rel=1e-12)
    for (name, one), (_, other) in zip(late.trainable.items(), early.trainable.items(), strict=True):
        assert torch.equal(one, other), name
    assert all(parameter.grad is None for parameter in early.trainable.values())


def test_weights_that_the_last_microbatch_does_not_reach_learn_too() -> None:
    """As the table of tokens, cut into two weights of which each microbatch reads one, would."""
    late, early = (made(SGDConfig(name="sgd", learning_rate=0.1), {}, early=early) for early in (False, True))
    for state in (late, early):
        extra = torch.nn.Parameter(torch.ones(3))
        state.model.register_parameter("sometimes", extra)
        if state is early:
            state.in_backward = InBackward(state.optimizer, {"sometimes": extra}, square)
        state.optimizer.add_param_group({**state.optimizer.param_groups[0], "params": [extra]})
        state.optimizer.state[extra] = {"step": 0}
        state.optimizer._names[extra] = "sometimes"
        extra.grad = torch.full((3,), 2.0)  # of an earlier microbatch alone
        update = optim_step(state, loss=0.0)
        assert update.gradient_norm == pytest.approx(2.0 * 3**0.5)
        assert torch.allclose(extra, torch.full((3,), 0.8))
        assert extra.grad is None


def test_clipping_cannot_be_asked_for_later() -> None:
    with pytest.raises(ConfigError, match="max_gradient_norm: weights are updated before the norm is known"):
        optim_step(made(*CASES["sgd"], early=True), max_gradient_norm=1.0)


def test_stochastic_bits_are_the_same_again() -> None:
    optimizer, how = StochasticAdamWConfig(name="stochastic_adamw"), {"precision": "bf16"}
    one, other = (made(optimizer, how, early=True) for _ in range(2))
    steps(one, 2), steps(other, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.trainable.values(), other.trainable.values(), strict=True))


def peak(state: TrainState) -> int:
    few = documents(lengths=(5,))  # so that gradients are most of what there is
    steps(state, 1, rows=few)
    held: list[torch.Tensor] = [*state.model.parameters(), *state.model.buffers()]
    held += [s for states in state.optimizer.state.values() for s in states.values() if isinstance(s, torch.Tensor)]
    with Watch(held) as watch:
        steps(state, 1, rows=few)
    return watch.peak


def test_gradients_are_not_there_all_at_once() -> None:
    late, early = (made(SGDConfig(name="sgd"), {}, early=early) for early in (False, True))
    gradients = sum(parameter.numel() * 4 for parameter in late.trainable.values())
    assert peak(late) - peak(early) > 0.25 * gradients


def test_on_two_ranks(world: Callable[[int], World]) -> None:
    late, early = (world(2).run(weights_after, early)[0] for early in (False, True))
    assert late.keys() == early.keys()
    assert float(early.pop("norm")) == pytest.approx(float(late.pop("norm")), rel=1e-12)
    for name, expected in late.items():
        assert torch.equal(expected, early[name]), name


def test_a_gradient_that_is_not_finite_changes_nothing_more() -> None:
    state = made(*CASES["adamw"], early=True)
    before = {name: parameter.detach().clone() for name, parameter in state.trainable.items()}
    with pytest.raises(NonFiniteError, match=r"optimizer.in_backward: the gradient of \S+ is not finite"):
        forward_backward_all(state, [Batch.pack(documents()).scaled(float("nan"))])
    assert all(torch.equal(before[name], parameter) for name, parameter in state.trainable.items())


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({}, "cannot clip to a global norm; set train.max_gradient_norm: null"),
        ({"max_gradient_norm": None, "on_non_finite": "skip"}, "cannot leave a step out"),
    ],
)
def test_what_needs_all_gradients_is_refused(train: dict[str, Any], said: str) -> None:
    run = {"model": "debug:llama", "data": "rows.jsonl", "optimizer": {"in_backward": True}, "train": train}
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(run)


def test_layouts_whose_gradients_come_late_are_refused() -> None:
    from luthier.parallel.layout import Layout
    from luthier.parallel.rules import check_in_backward

    with pytest.raises(ConfigError, match="gradients under tp and pp are put together after the backward pass"):
        check_in_backward(Layout(tp=2, pp=2))
    check_in_backward(Layout(dp_shard=2, dp_replicate=2))
