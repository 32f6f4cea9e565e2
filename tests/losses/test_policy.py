"""Oracle: each loss as a Python loop over tokens in float64, written from its formula, and its gradient by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from luthier.errors import ConfigError, DataError
from luthier.losses.table import LOSSES, loss_named

BOUNDS = [0, 4, 4 + 7, 4 + 7 + 5]
Row = tuple[float, float]
"""Loss and gradient of one token."""


def clipped(ratio: float, advantage: float, low: float, high: float) -> Row:
    """-min(r A, clip(r) A), and its derivative by log r: -r A unless only the clipped side is the smaller."""
    inside = min(max(ratio, low), high)
    value = min(ratio * advantage, inside * advantage)
    return -value, -ratio * advantage if ratio * advantage <= inside * advantage else 0.0


FORMULAS: dict[str, Callable[..., Row]] = {
    "importance_sampling": lambda p, q, a, s: (-math.exp(p - q) * a, -math.exp(p - q) * a),
    "ppo": lambda p, q, a, s: clipped(
        math.exp(p - q), a, s.get("clip_low_threshold", 0.8), s.get("clip_high_threshold", 1.2)
    ),
    "cispo": lambda p, q, a, s: (
        -min(max(math.exp(p - q), s.get("clip_low_threshold", 0.0)), s.get("clip_high_threshold", 4.0)) * p * a,
        -min(max(math.exp(p - q), s.get("clip_low_threshold", 0.0)), s.get("clip_high_threshold", 4.0)) * a,
    ),
    "dro": lambda p, q, a, s: (
        -(p * a - 0.5 * s.get("beta", 0.05) * (p - q) ** 2),
        -(a - s.get("beta", 0.05) * (p - q)),
    ),
}


def reference(
    name: str, fields: dict[str, torch.Tensor], logprobs: torch.Tensor, settings: dict[str, float]
) -> tuple[float, list[float]]:
    """Sum over tokens and the gradient by each log-probability."""
    now, then, advantages = logprobs.tolist(), fields["logprobs"].tolist(), fields["advantages"].tolist()
    rows: list[Row] = []
    if name != "gspo":
        rows = [FORMULAS[name](p, q, a, settings) for p, q, a in zip(now, then, advantages, strict=True)]
    else:
        mask = fields["sequence_ratio_mask"].tolist()
        low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
        for start, stop in itertools.pairwise(BOUNDS):
            inside = [t for t in range(start, stop) if mask[t]]
            mean = sum(now[t] - then[t] for t in inside) / len(inside) if inside else 0.0
            rows += [clipped(math.exp(mean), advantages[t], low, high) for t in range(start, stop)]
    return sum(value for value, _ in rows), [slope for _, slope in rows]


def make(name: str, seed: int = 0, spread: float = 0.5) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Fields and log-probabilities: advantages of both signs and 0, ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(BOUNDS[-1], generator=generator, dtype=torch.float64) * 3 - 0.05
    shift = torch.randn(BOUNDS[-1], generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(BOUNDS[-1], generator=generator, dtype=torch.float64)
    advantages[::5] = 0
    fields = {"logprobs": logprobs - shift, "advantages": advantages}
    if name == "gspo":
        fields["sequence_ratio_mask"] = torch.tensor([0.0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]).double()
    return fields, logprobs


def ours(
    name: str, fields: dict[str, torch.Tensor], logprobs: torch.Tensor, settings: dict[str, float]
) -> tuple[float, list[float]]:
    loss = loss_named(name)
    leaf = logprobs.clone().requires_grad_()
    value = loss.value(leaf, fields, torch.tensor(BOUNDS, dtype=torch.int32), loss.settings_of(settings))
    value.backward()
    assert value.dtype == torch.float64
    assert leaf.grad is not None
    return value.item(), leaf.grad.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_values_and_gradients_are_the_formulas(name: str, spread: float, seed: int) -> None:
    fields, logprobs = make(name, seed, spread)
    for settings in ({}, {key: value * 0.9 for key, value in LOSSES[name].settings.items()}):
        value, slopes = ours(name, fields, logprobs, settings)
        want, want_slopes = reference(name, fields, logprobs, settings)
        assert value == pytest.approx(want, rel=1e-12, abs=1e-12)
        assert slopes == pytest.approx(want_slopes, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize(("ratio", "cut"), [(0.5, "below"), (1.0, ""), (2.0, ""), (4.0, "above")])
def test_the_edges_of_clipping(ratio: float, cut: str, advantage: float) -> None:
    """Bounds that are powers of 2, so that the ratio lies on one exactly: 1 and 2 are inside."""
    fields = {"logprobs": torch.zeros(1).double(), "advantages": torch.full((1,), advantage).double()}
    logprobs = torch.full((1,), math.log(ratio)).double()
    exact = math.exp(logprobs.item())
    leaf = logprobs.clone().requires_grad_()
    loss = loss_named("ppo")
    bounds = {"clip_low_threshold": exact if ratio == 1 else 1.0, "clip_high_threshold": exact if ratio == 2 else 2.0}
    loss.value(leaf, fields, torch.tensor([0, 1]), bounds).backward()
    stopped = (cut == "above" and advantage > 0) or (cut == "below" and advantage < 0)
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(0.0 if stopped else -exact * advantage, rel=1e-15)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_advantage_adds_nothing_whatever_it_was_sampled_with(name: str) -> None:
    fields, logprobs = make(name)
    fields["logprobs"][::5] = -1e4
    if name == "gspo":
        fields["sequence_ratio_mask"][::5] = 0
    value, slopes = ours(name, fields, logprobs, {})
    assert math.isfinite(value)
    assert slopes[::5] == [0.0] * 4
    counted = LOSSES[name].counts(fields)
    assert not counted[::5].any()
    again, _ = ours(name, fields, torch.where(counted, logprobs, 0.0), {})  # the head is asked for no others
    assert again == value


def test_a_document_with_an_empty_mask_has_ratio_one() -> None:
    fields, logprobs = make("gspo", spread=3.0)
    fields["sequence_ratio_mask"].zero_()
    value, slopes = ours("gspo", fields, logprobs, {})
    assert value == pytest.approx(-fields["advantages"].sum().item())
    assert slopes == pytest.approx((-fields["advantages"]).tolist())


def test_cross_entropy_takes_soft_targets_and_weights_of_any_sign() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(6, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    weights[1] = 0
    loss = loss_named("cross_entropy")
    value = loss.value(logprobs, {"weights": weights}, torch.tensor([0, 6]), {})
    value.backward()
    want = -sum(w * p for w, p in zip(weights.flatten().tolist(), logprobs.flatten().tolist(), strict=True))
    assert value.item() == pytest.approx(want, rel=1e-14)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -weights)
    assert loss.counts({"weights": weights}).tolist() == [True, False, True, True, True, True]


def fields_of(name: str, tokens: int = 4) -> dict[str, torch.Tensor]:
    loss = LOSSES[name]
    found = {key: torch.ones(tokens) for key in (*loss.fields, *loss.optional)}
    return found | {"target_tokens": torch.zeros(tokens, dtype=torch.int64)}


@pytest.mark.parametrize("name", list(LOSSES))
def test_what_a_loss_cannot_read_is_refused_by_datum_and_field(name: str) -> None:
    loss, good = LOSSES[name], fields_of(name)
    loss.check(good, 4, "data[3]")
    for key in loss.fields:
        with pytest.raises(DataError, match=rf"data\[3\]\.loss_fn_inputs\.{key}: {key} is missing, which {name}"):
            loss.check({k: v for k, v in good.items() if k != key}, 4, "data[3]")
    for key in (*loss.fields, *loss.optional):
        bad = good[key].clone()
        bad[2] = math.nan
        with pytest.raises(DataError, match=rf"data\[3\]\.loss_fn_inputs\.{key}: value 2 is nan"):
            loss.check(good | {key: bad}, 4, "data[3]")
        with pytest.raises(DataError, match=rf"{key}: it has 3 values, and model_input has 4 tokens"):
            loss.check(good | {key: good[key][:3]}, 4, "data[3]")
    with pytest.raises(DataError, match=f"{name} has no use for mood; it reads target_tokens"):
        loss.check(good | {"mood": torch.ones(4)}, 4, "data[3]")
    with pytest.raises(DataError, match="token ids are whole numbers"):
        loss.check(good | {"target_tokens": torch.zeros(4)}, 4, "data[3]")
    if not loss.soft:
        with pytest.raises(DataError, match=r"it is \[4, 2\], and \w+ takes \[T\]"):
            loss.check(good | {"target_tokens": torch.zeros(4, 2, dtype=torch.int64)}, 4, "data[3]")


def test_soft_targets_and_their_weights_have_one_shape() -> None:
    fields = {"target_tokens": torch.zeros(4, 2, dtype=torch.int64), "weights": torch.ones(4)}
    with pytest.raises(DataError, match=r"weights: it is \[4\], and target_tokens is \[4, 2\]"):
        LOSSES["cross_entropy"].check(fields, 4, "data[0]")


def test_masks_hold_zero_and_one() -> None:
    fields = fields_of("gspo") | {"sequence_ratio_mask": torch.tensor([0.0, 1.0, 0.5, 1.0])}
    with pytest.raises(DataError, match="a mask holds 0 and 1 alone"):
        LOSSES["gspo"].check(fields, 4, "data[0]")


def test_unknown_losses_and_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no loss 'stable_reinforce'; there are cross_entropy, importance"):
        loss_named("stable_reinforce")
    with pytest.raises(ConfigError, match=r"loss_fn_config\.epsilon: ppo has no such setting; it has clip_low"):
        loss_named("ppo").settings_of({"epsilon": 0.2})
    with pytest.raises(ConfigError, match="cross_entropy has no such setting; leave"):
        loss_named("cross_entropy").settings_of({"beta": 0.1})
    for bad in (math.nan, -0.1, "0.1", True, math.inf):
        with pytest.raises(ConfigError, match=r"loss_fn_config\.beta"):
            loss_named("dro").settings_of({"beta": bad})
    with pytest.raises(ConfigError, match=r"clip_low_threshold 1.5 is above clip_high_threshold 1.2"):
        loss_named("ppo").settings_of({"clip_low_threshold": 1.5})
