"""Oracle: the whole logits in float64, softmax and autograd of torch."""

from __future__ import annotations

import pytest
import torch

from luthier.losses.cross_entropy import (
    LogitsFunction,
    chunked_logprobs,
    cross_entropy_from_logits,
    streamed_cross_entropy,
    streamed_logprobs,
)

VOCABULARY, HIDDEN = 97, 16


def make(n: int, dtype: torch.dtype, size: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) * size
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (n,), generator=generator)
    coefficients = torch.randn(n, generator=generator, dtype=torch.float64)
    if n > 2:
        coefficients[1::3] = 0
        targets[2] = targets[0]
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *leaves, targets, coefficients


def transform(logits: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    logits = logits * scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = leaves[0] @ leaves[1].T + (leaves[2] if bias is not None else 0)
    logprobs = torch.log_softmax(transform(logits, scale, soft_cap), -1).gather(1, targets[:, None])[:, 0]
    loss = -(coefficients * logprobs).sum()
    return loss.detach(), logprobs.detach(), list(torch.autograd.grad(loss, leaves))


def error(got: torch.Tensor | None, want: torch.Tensor) -> float:
    assert got is not None
    largest = want.abs().max().item() if want.numel() else 0.0
    difference = (got.double() - want).abs().max().item() if want.numel() else 0.0
    return difference / largest if largest else difference


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.25, None), (1.0, 5.0), (0.5, 3.0)])
@pytest.mark.parametrize(("chunk", "tile"), [(512, None), (4, 10), (1, 97)])
def test_streamed_is_the_formula(
    dtype: torch.dtype,
    bound: float,
    with_bias: bool,
    scale: float,
    soft_cap: float | None,
    chunk: int,
    tile: int | None,
) -> None:
    hidden, weight, bias, targets, coefficients = make(11, dtype)
    given = bias if with_bias else None
    loss, logprobs = streamed_cross_entropy(
        hidden, weight, targets, coefficients, bias=given, scale=scale, soft_cap=soft_cap, chunk=chunk, tile=tile
    )
    loss.backward()
    want_loss, want_logprobs, want = oracle(hidden, weight, given, targets, coefficients, scale, soft_cap)
    assert error(loss, want_loss) < bound
    trained = coefficients != 0
    assert error(logprobs[trained], want_logprobs[trained]) < bound
    assert (logprobs[~trained] == 0).all()
    for leaf, gradient in zip([hidden, weight, bias], want, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert error(leaf.grad, gradient) < bound


@pytest.mark.parametrize("size", [30.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tile", [None, 7])
def test_huge_logits_are_right(size: float, dtype: torch.dtype, tile: int | None) -> None:
    hidden, weight, _, targets, coefficients = make(11, dtype, size)
    loss, _ = streamed_cross_entropy(hidden, weight, targets, coefficients, tile=tile)
    loss.backward()
    want_loss, _, want = oracle(hidden, weight, None, targets, coefficients)
    bound = 1e-12 if dtype == torch.float64 else 1e-4  # fp32 logits of 1e3 are themselves off by 1e-4
    assert error(loss, want_loss) < bound
    assert error(hidden.grad, want[0]) < bound
    assert error(weight.grad, want[1]) < bound


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_shifted_logits_are_right(offset: float) -> None:
    """exp of such logits is 0 or infinite in fp32 (gpt2's logits lie near -100)."""
    hidden, weight, _, targets, coefficients = make(11, torch.float32)
    bias = torch.full((VOCABULARY,), offset, requires_grad=True)
    loss, _ = streamed_cross_entropy(hidden, weight, targets, coefficients, bias=bias, tile=16)
    loss.backward()
    want_loss, _, want = oracle(hidden, weight, bias, targets, coefficients)
    assert error(loss, want_loss) < 1e-4
    assert error(hidden.grad, want[0]) < 1e-4
    assert error(bias.grad, want[2]) < 1e-4


def test_largest_logit_far_beyond_the_first_columns() -> None:
    """The shift is guessed from the first columns; a maximum 200 above it overflows and must be noticed."""
    hidden, weight, _, targets, coefficients = make(5, torch.float32)
    with torch.no_grad():
        weight[90] = hidden[0] * 200 / hidden[0].square().sum()
    loss, _ = streamed_cross_entropy(hidden, weight, targets, coefficients, tile=32)
    loss.backward()
    want_loss, _, want = oracle(hidden, weight, None, targets, coefficients)
    assert error(loss, want_loss) < 1e-6
    assert error(hidden.grad, want[0]) < 1e-5


def test_confident_tokens_keep_their_gradient() -> None:
    """p(target) is 1 to fp32 precision; p - 1 would be 0 or noise, the gradient is about e^-20."""
    hidden = torch.zeros(1, HIDDEN)
    hidden[0, 0] = 20.0
    weight = torch.zeros(VOCABULARY, HIDDEN)
    weight[3, 0] = 1.0
    weight[:, 1] = torch.linspace(-1, 1, VOCABULARY)
    for dtype, bound in [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]:
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        loss, logprobs = streamed_cross_entropy(leaf, weight.to(dtype), torch.tensor([3]), torch.ones(1))
        loss.backward()
        want_loss, want_logprobs, want = oracle(
            leaf, weight.to(dtype), None, torch.tensor([3]), torch.ones(1, dtype=torch.float64)
        )
        assert 0 < want_loss < 1e-6
        assert error(loss, want_loss) < bound
        assert error(logprobs, want_logprobs) < bound
        assert error(leaf.grad, want[0]) < bound


@pytest.mark.parametrize("n", [0, 1, 5])
def test_nothing_to_train_gives_zero_and_gradients(n: int) -> None:
    hidden, weight, bias, targets, _ = make(n, torch.float32)
    zeros = torch.zeros(n, dtype=torch.float64)
    for loss, logprobs in (
        streamed_cross_entropy(hidden, weight, targets, zeros, bias=bias),
        cross_entropy_from_logits(lambda h: h @ weight.T + bias, hidden, targets, zeros),
    ):
        for leaf in (hidden, weight, bias):
            leaf.grad = None
        loss.backward()
        assert loss.item() == 0
        assert logprobs.shape == (n,)
        for leaf in (hidden, weight, bias):
            assert leaf.grad is not None
            assert not leaf.grad.any()


def test_chunks_and_tiles_change_nothing_but_rounding() -> None:
    """Whatever is made at a time, fp32 is as near to the formula in float64."""
    for chunk, tile in [(512, None), (3, 20), (1, 5)]:
        hidden, weight, _, targets, coefficients = make(11, torch.float32)
        expected, _, gradients = oracle(hidden, weight, None, targets, coefficients)
        loss, _ = streamed_cross_entropy(hidden, weight, targets, coefficients, chunk=chunk, tile=tile)
        loss.backward()
        for found, right in zip((loss, hidden.grad, weight.grad), (expected, *gradients), strict=True):
            assert error(found, right) <= 2e-6


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_any_head_is_the_formula(chunk: int) -> None:
    hidden, weight, bias, targets, coefficients = make(11, torch.float64)
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)  # trained, but nothing that this head reads

    def head(states: torch.Tensor) -> torch.Tensor:
        return transform(states @ weight.T + bias, 0.5, 3.0)

    loss, logprobs = cross_entropy_from_logits(head, hidden, targets, coefficients, chunk)
    loss.backward()
    want_loss, want_logprobs, want = oracle(hidden, weight, bias, targets, coefficients, 0.5, 3.0)
    assert error(loss, want_loss) < 1e-12
    assert error(logprobs[coefficients != 0], want_logprobs[coefficients != 0]) < 1e-12
    for leaf, gradient in zip([hidden, weight, bias], want, strict=True):
        assert error(leaf.grad, gradient) < 1e-12
    assert other.grad is None


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_chunked_logprobs_have_all_gradients(chunk: int) -> None:
    hidden, weight, bias, targets, coefficients = make(11, torch.float64)
    head: LogitsFunction = lambda states: states @ weight.T + bias  # noqa: E731
    logprobs = chunked_logprobs(head, hidden, targets, chunk)
    (-(coefficients * logprobs).sum()).backward()
    _, want_logprobs, want = oracle(hidden, weight, bias, targets, coefficients)
    assert error(logprobs, want_logprobs) < 1e-12
    for leaf, gradient in zip([hidden, weight, bias], want, strict=True):
        assert error(leaf.grad, gradient) < 1e-12


@pytest.mark.parametrize("trains", [True, False], ids=["head trains", "head is frozen"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.5, 3.0)])
@pytest.mark.parametrize("chunk", [4, 512])
def test_streamed_logprobs_have_all_gradients(
    chunk: int, scale: float, soft_cap: float | None, dtype: torch.dtype, bound: float, trains: bool
) -> None:
    hidden, weight, bias, targets, coefficients = make(11, dtype)
    weight.requires_grad_(trains)
    bias.requires_grad_(trains)
    how = {"bias": bias, "scale": scale, "soft_cap": soft_cap, "chunk": chunk, "tile": 32}
    logprobs = streamed_logprobs(hidden, weight, targets, **how)
    (-(coefficients * logprobs).sum()).backward()
    _, want_logprobs, want = oracle(hidden, weight, bias, targets, coefficients, scale, soft_cap)
    assert error(logprobs, want_logprobs) < bound
    for leaf, gradient in zip([hidden, weight, bias] if trains else [hidden], want, strict=False):
        assert error(leaf.grad, gradient) < bound
    if not trains:
        assert weight.grad is None
    with torch.no_grad():
        assert torch.equal(streamed_logprobs(hidden, weight, targets, **how), logprobs)


def test_streamed_logprobs_of_nothing() -> None:
    for trains in (True, False):
        hidden, weight, _, targets, _ = make(0, torch.float32)
        logprobs = streamed_logprobs(hidden, weight.requires_grad_(trains), targets)
        assert logprobs.shape == (0,)
        logprobs.sum().backward()
        assert hidden.grad is not None
        assert (weight.grad is None) or not weight.grad.any()


def test_chunked_logprobs_of_nothing() -> None:
    hidden, weight, _, targets, _ = make(0, torch.float32)
    logprobs = chunked_logprobs(lambda states: states @ weight.T, hidden, targets)
    assert logprobs.shape == (0,)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_without_gradients_only_values() -> None:
    hidden, weight, _, targets, coefficients = make(11, torch.float32)
    with torch.no_grad():
        loss, logprobs = streamed_cross_entropy(hidden, weight, targets, coefficients)
        other, _ = cross_entropy_from_logits(lambda h: h @ weight.T, hidden, targets, coefficients)
    assert not loss.requires_grad
    assert not other.requires_grad
    torch.testing.assert_close(loss, other)
    assert not logprobs.requires_grad


def test_loss_scales_its_gradient_and_can_be_asked_twice() -> None:
    hidden, weight, _, targets, coefficients = make(11, torch.float64)
    loss, _ = streamed_cross_entropy(hidden, weight, targets, coefficients)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(second, 3 * first)


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets, coefficients = make(11, torch.float32)
    loss, _ = streamed_cross_entropy(hidden, weight.detach(), targets, coefficients)
    loss.backward()
    _, _, want = oracle(hidden, weight, None, targets, coefficients)
    assert error(hidden.grad, want[0]) < 2e-6


def require_no_more(slope: torch.Tensor, hidden: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(slope.square().sum(), hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        slope.square().sum().backward()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_second_derivative_is_refused(known: bool, frozen: bool) -> None:
    hidden, weight, _, targets, coefficients = make(11, torch.float64)
    weight.requires_grad_(not frozen)
    if known:
        loss = streamed_cross_entropy(hidden, weight, targets, coefficients)[0].square()
    else:
        loss = (streamed_logprobs(hidden, weight, targets) * coefficients).sum().square()
    [slope] = torch.autograd.grad(loss, hidden, create_graph=True)
    require_no_more(slope, hidden)


def test_a_second_derivative_of_any_head_is_refused() -> None:
    hidden, weight, _, targets, coefficients = make(11, torch.float64)
    loss, _ = cross_entropy_from_logits(lambda piece: piece @ weight.T, hidden, targets, coefficients)
    [slope] = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    require_no_more(slope, hidden)
