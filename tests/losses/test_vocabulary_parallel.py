"""A loss over a vocabulary that several ranks share, against a float64 softmax of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from luthier.losses.cross_entropy import chunked_logprobs, cross_entropy_from_logits
from luthier.losses.vocabulary_parallel import VocabularyShard, vocabulary_parallel_cross_entropy

N, HIDDEN = 37, 12


def made(vocabulary: int, spread: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    coefficients = torch.randn(N, generator=generator, dtype=torch.float64)
    coefficients[::5] = 0
    return {
        "hidden": torch.randn(N, HIDDEN, generator=generator, dtype=torch.float64) * spread,
        "weight": torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64),
        "bias": torch.randn(vocabulary, generator=generator, dtype=torch.float64),
        "targets": torch.randint(0, vocabulary, (N,), generator=generator),
        "coefficients": coefficients,
    }


def formula(given: dict[str, torch.Tensor], biased: bool, scale: float, soft_cap: float | None) -> dict[str, Any]:
    """Value and gradients by plain operations."""
    hidden, weight, bias = (given[key].clone().requires_grad_() for key in ("hidden", "weight", "bias"))
    logits = (hidden @ weight.t() + (bias if biased else 0)) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logprobs = torch.log_softmax(logits, -1).gather(1, given["targets"][:, None])[:, 0]
    loss = -(given["coefficients"] * logprobs).sum()
    loss.backward()
    return {"loss": loss.detach(), "logprobs": logprobs.detach(), "hidden": hidden.grad, "weight": weight.grad} | (
        {"bias": bias.grad} if biased else {}
    )


def own(size: int) -> tuple[VocabularyShard, slice]:
    group = torch.distributed.group.WORLD
    assert group is not None
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    part = -(-size // ranks)
    start, stop = min(rank * part, size), min((rank + 1) * part, size)
    return VocabularyShard(group, start, size), slice(start, stop)


def streamed(
    given: dict[str, torch.Tensor], biased: bool, scale: float, soft_cap: float | None, chunk: int, dtype: torch.dtype
) -> dict[str, Any]:
    """On every rank: the same by its own rows."""
    shard, here = own(len(given["weight"]))
    hidden = given["hidden"].to(dtype).requires_grad_()
    weight = given["weight"][here].to(dtype).requires_grad_()
    bias = given["bias"][here].to(dtype).requires_grad_() if biased else None
    loss, logprobs = vocabulary_parallel_cross_entropy(
        hidden,
        weight,
        given["targets"],
        given["coefficients"],
        shard,
        bias=bias,
        scale=scale,
        soft_cap=soft_cap,
        chunk=chunk,
    )
    (loss * 2).backward()
    gradients = {"hidden": hidden.grad, "weight": weight.grad} | ({"bias": bias.grad} if bias is not None else {})
    return {"loss": loss.detach(), "logprobs": logprobs} | {
        key: value / 2 for key, value in gradients.items() if value is not None
    }


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of all ranks laid end to end; what all have must be equal bit for bit."""
    whole = dict(ranks[0])
    for key in ("weight", "bias"):
        if key in whole:
            whole[key] = torch.cat([rank[key] for rank in ranks])
    for rank in ranks[1:]:
        assert all(torch.equal(rank[key], whole[key]) for key in ("loss", "logprobs", "hidden"))
    return whole


def compare(found: dict[str, Any], expected: dict[str, Any], given: dict[str, torch.Tensor], bound: float) -> None:
    trained = given["coefficients"] != 0
    assert bool((found["logprobs"][~trained] == 0).all())
    assert bool((found["hidden"][~trained] == 0).all())
    expected = expected | {"logprobs": expected["logprobs"].where(trained, 0.0)}
    for key, value in expected.items():
        assert float((found[key].double() - value).abs().max()) <= bound * float(value.abs().max()), key


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("vocabulary", "biased", "scale", "soft_cap", "chunk"),
    [(40, False, 1.0, None, 1024), (41, True, 0.25, None, 16), (29, True, 1.0, 2.0, 7), (5, False, 3.0, None, 64)],
)
def test_equals_the_formula(
    world: Any, size: int, vocabulary: int, biased: bool, scale: float, soft_cap: float | None, chunk: int
) -> None:
    given = made(vocabulary)
    ranks = world(size).run(streamed, given, biased, scale, soft_cap, chunk, torch.float64)
    compare(together(ranks), formula(given, biased, scale, soft_cap), given, 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precisions(world: Any, dtype: torch.dtype, bound: float) -> None:
    given = made(53)
    given = {key: value.to(dtype).double() if value.is_floating_point() else value for key, value in given.items()}
    ranks = world(2).run(streamed, given, True, 1.0, None, 16, dtype)
    compare(together(ranks), formula(given, True, 1.0, None), given, bound)


def test_confident_tokens_keep_their_gradient(world: Any) -> None:
    given = made(40, spread=8.0)  # in numbers that bf16 has, so that rounding the input is no error
    given = {key: value.bfloat16().double() if value.is_floating_point() else value for key, value in given.items()}
    given["targets"] = (given["hidden"] @ given["weight"].t()).argmax(1)
    found = together(world(2).run(streamed, given, False, 1.0, None, 1024, torch.float32))
    expected = formula(given, False, 1.0, None)
    assert bool((expected["hidden"].abs().sum(1) > 0).any())
    sizes = expected["hidden"].abs().amax(1)
    kept = sizes > 1e-11  # below, the formula itself cancels in float64
    error = (found["hidden"].double() - expected["hidden"]).abs().amax(1)
    assert bool((sizes[kept] < 2e-8).any())  # 1 - p is 0 in fp32
    assert bool((error[kept] <= 1e-3 * sizes[kept]).all())


def by_logits(given: dict[str, torch.Tensor], later: bool) -> dict[str, Any]:
    """On every rank: a head of any form, whose input enters work that each rank does a part of."""
    shard, here = own(len(given["weight"]))
    hidden = given["hidden"].clone().requires_grad_()
    weight = given["weight"][here].clone().requires_grad_()

    def head(piece: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(piece, weight))

    if later:
        logprobs = chunked_logprobs(head, hidden, given["targets"], 16, shard.logprobs)
        loss = -(logprobs * given["coefficients"]).sum()
    else:
        loss, logprobs = cross_entropy_from_logits(
            head, hidden, given["targets"], given["coefficients"], 16, shard.logprobs
        )
    loss.backward()
    assert hidden.grad is not None
    torch.distributed.all_reduce(hidden.grad)  # what `regions.enter` does in a model
    return {"loss": loss.detach(), "logprobs": logprobs.detach(), "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.parametrize("later", [False, True])
def test_any_head(world: Any, later: bool) -> None:
    given = made(41)
    found = together(world(2).run(by_logits, given, later))
    hidden, weight = (given[key].clone().requires_grad_() for key in ("hidden", "weight"))
    logprobs = -F.cross_entropy(torch.tanh(F.linear(hidden, weight)), given["targets"], reduction="none")
    loss = -(logprobs * given["coefficients"]).sum()
    loss.backward()
    expected = {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}
    for key, value in expected.items():
        assert value is not None
        assert float((found[key] - value).abs().max()) <= 1e-12 * float(value.abs().max())
    trained = given["coefficients"] != 0
    assert torch.allclose(found["logprobs"][trained], logprobs.detach()[trained], rtol=1e-12)


def nothing_trained(given: dict[str, torch.Tensor]) -> list[float]:
    """On every rank: the sums of a batch that counts nothing."""
    return [float(value.abs().sum()) for value in streamed(given, True, 1.0, None, 16, torch.float64).values()]


def test_positions_that_count_nothing_add_nothing(world: Any) -> None:
    given = made(40) | {"coefficients": torch.zeros(N, dtype=torch.float64)}
    assert world(2).run(nothing_trained, given) == [[0.0] * 5] * 2
