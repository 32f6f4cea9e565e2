"""Head and cross-entropy together, in chunks of positions: no [tokens, vocabulary] tensor is ever whole.

| the coefficients are | the head is | use |
| --- | --- | --- |
| known | linear (scale, cap, bias) | `streamed_cross_entropy`: one pass over the vocabulary, gradient on the way |
| known | anything | `cross_entropy_from_logits`: chunks of logits, gradient on the way |
| known later (DPO, policy losses) | linear | `streamed_logprobs`: one pass for a frozen head, two for one that trains |
| known later | anything | `chunked_logprobs`: chunks of logits, made again in the backward |

Positions of coefficient 0 never reach the head. Log-probabilities, the target's logit and the sums of the softmax are
in fp32, or float64 for float64. Of a linear bf16 head the exponentials of the other tokens are bf16, as its logits are:
what that rounds averages out in the sum, and the result is nearer to float64 than a softmax in fp32 of bf16 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from luthier.losses.chunks import DEFAULT_CHUNK, LOGITS_CHUNK
from luthier.losses.streaming import Gradients, LinearHead, stream

_KEPT_BYTES = 320 << 20
"""Scores kept for the gradient of the weight are at most this large."""

_TILE_CPU, _TILE_DEVICE = 2048, 16384
"""Columns of the vocabulary at a time: on the CPU a tile of scores stays in the second-level cache."""

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]
"""[n, hidden] -> [n, vocabulary]."""
LogprobsFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[n, vocabulary] and targets [n] -> [n], or targets [n, K] -> [n, K]."""


def streamed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = DEFAULT_CHUNK,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of coefficient * -log p(target) for a linear head, with its gradient made on the way.

    Args:
        hidden: [n, hidden]; n may be 0.
        weight: [vocabulary, hidden], in the dtype of hidden.
        targets: int64 [n].
        coefficients: [n], any sign and any float dtype; positions with 0 are left out.
        bias: [vocabulary] or None.
        scale: factor on the logits.
        soft_cap: cap on the scaled logits, soft_cap * tanh(logits / soft_cap).
        chunk: positions at a time; fewer where the weight trains, whose scores are kept for a moment.
        tile: columns of the vocabulary at a time; None = what suits the device.

    Returns:
        the loss, a scalar in float64, and the log-probabilities [n] in fp32 (float64 for float64), 0 at positions that
        were left out. The loss has gradients for hidden, weight and bias; the log-probabilities have none.

    >>> hidden = torch.zeros(2, 4, requires_grad=True)
    >>> targets, coefficients = torch.tensor([1, 2]), torch.tensor([1.0, 0.0])
    >>> loss, logprobs = streamed_cross_entropy(hidden, torch.zeros(8, 4), targets, coefficients)
    >>> round(loss.item(), 4), [round(x, 4) for x in logprobs.tolist()]
    (2.0794, [-2.0794, 0.0])
    """
    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    wants = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    ]
    with torch.no_grad():
        head = LinearHead(weight.detach(), None if bias is None else bias.detach(), scale, soft_cap)
        rows = coefficients.nonzero()[:, 0]
        chosen, chosen_targets, factors = hidden[rows], targets[rows], coefficients[rows]
        of_hidden, of_weight, of_bias = _room(chosen, head, wants)
        found = torch.zeros(len(targets), dtype=wide_dtype(hidden), device=hidden.device)
        gradients = (of_hidden, of_weight, of_bias)
        found[rows] = _pass(chosen, head, chosen_targets, factors, gradients, chunk, tile)
        loss = -exact_sum(coefficients, found)
        if not any(wants):
            return loss, found
        if of_hidden is not None:
            of_hidden = torch.zeros_like(hidden).index_copy_(0, rows, of_hidden)
    return with_gradients(loss, inputs, (of_hidden, of_weight, of_bias)[: len(inputs)]), found


def streamed_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = DEFAULT_CHUNK,
    tile: int | None = None,
) -> torch.Tensor:
    """Log-probabilities of the targets for a linear head, for a loss that says later how much each counts.

    How a log-probability depends on its own hidden state is known when it is: a frozen head needs no second pass.

    Args:
        hidden: [n, hidden]; n may be 0.
        weight: [vocabulary, hidden], in the dtype of hidden.
        targets: int64 [n].
        bias, scale, soft_cap, chunk, tile: as of `streamed_cross_entropy`.

    Returns:
        [n] in fp32 (float64 for float64), with gradients for hidden, weight and bias.
    """
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(torch.Tensor, _Logprobs.apply(hidden, weight, bias, targets, scale, soft_cap, chunk, tile))
    with torch.no_grad():
        head = LinearHead(weight, bias, scale, soft_cap)
        return _pass(hidden, head, targets, _ones(targets, hidden), (None, None, None), chunk, tile)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        soft_cap: float | None,
        chunk: int,
        tile: int | None,
    ) -> torch.Tensor:
        ctx.how = scale, soft_cap, chunk, tile
        ctx.frozen = not any(ctx.needs_input_grad[1:3])
        slopes = None
        if ctx.frozen and ctx.needs_input_grad[0]:  # wide: they are rounded once, when it is known how much they count
            slopes = torch.empty(hidden.shape, dtype=wide_dtype(hidden), device=hidden.device)
        found = _pass(
            hidden,
            LinearHead(weight, bias, scale, soft_cap),
            targets,
            -_ones(targets, hidden),
            (slopes, None, None),
            chunk,
            tile,
        )
        ctx.narrow = hidden.dtype
        ctx.save_for_backward(*([slopes] if ctx.frozen else [hidden, weight, bias, targets]))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        nothing = (None,) * 5
        if ctx.frozen:
            (slopes,) = ctx.saved_tensors
            return (slopes * gradients[0][:, None]).to(ctx.narrow), None, None, *nothing
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, soft_cap, chunk, tile = ctx.how
        head = LinearHead(weight, bias, scale, soft_cap)
        sums = _room(hidden, head, ctx.needs_input_grad)
        _pass(hidden, head, targets, -gradients[0], sums, chunk, tile)
        return *sums, *nothing


def _ones(targets: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(targets, dtype=wide_dtype(hidden))


_ThreeGradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of hidden states, weight and bias; None = not wanted."""


def _room(hidden: torch.Tensor, head: LinearHead, wants: Sequence[bool]) -> _ThreeGradients:
    """Room for the gradients that are wanted; it is overwritten where there are positions."""
    make = torch.empty_like if len(hidden) else torch.zeros_like
    of_hidden, of_weight, of_bias = (
        make(tensor) if want and tensor is not None else None
        for tensor, want in zip((hidden, head.weight, head.bias), wants, strict=False)
    )
    return of_hidden, of_weight, of_bias


def _pass(
    hidden: torch.Tensor,
    head: LinearHead,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    gradients: _ThreeGradients,
    chunk: int,
    tile: int | None,
) -> torch.Tensor:
    """Log-probabilities [n] of all positions, and into `gradients`, of hidden, weight and bias as far as there, those
    of the sum of coefficient * -log p."""
    of_hidden, of_weight, of_bias = gradients
    if of_weight is not None or of_bias is not None:
        chunk = min(chunk, max(64, _KEPT_BYTES // (len(head.weight) * head.weight.element_size())))
    found = torch.zeros(len(targets), dtype=wide_dtype(hidden), device=hidden.device)
    width = tile or (_TILE_CPU if hidden.device.type == "cpu" else _TILE_DEVICE)
    wanted = any(gradient is not None for gradient in gradients)
    for start in range(0, len(targets), chunk):
        here = slice(start, start + chunk)
        part = None if of_hidden is None else of_hidden[here]
        buffers = Gradients(part, of_weight, of_bias, add=start > 0) if wanted else None
        found[here] = stream(hidden[here], head, targets[here], coefficients[here], buffers, width)
    return found


def cross_entropy_from_logits(
    logits_fn: LogitsFunction,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    chunk: int = LOGITS_CHUNK,
    logprobs: LogprobsFunction | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of coefficient * -log p(target) for any head, with its gradient made on the way.

    Args:
        logits_fn: the model's own head, [n, hidden] -> [n, vocabulary]; what it reads and trains gets its gradient.
        hidden: [n, hidden]; n may be 0.
        targets: int64 [n].
        coefficients: [n], any sign; positions with 0 are left out.
        chunk: positions at a time.
        logprobs: what makes log-probabilities of logits and targets; that of a whole vocabulary when left out.

    Returns:
        as `streamed_cross_entropy`.
    """
    training = torch.is_grad_enabled()
    rows = coefficients.nonzero()[:, 0]
    found = torch.zeros(len(targets), dtype=wide_dtype(hidden), device=hidden.device)
    hidden_gradient = torch.zeros_like(hidden) if training and hidden.requires_grad else None
    leaves: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for number, start in enumerate(range(0, max(len(rows), 1), chunk)):
        # Without trained tokens one position of coefficient 0 goes through: the gradients exist and are 0.
        here = rows[start : start + chunk] if len(rows) else torch.zeros(min(1, len(targets)), dtype=torch.int64)
        piece = hidden.detach()[here].requires_grad_(hidden_gradient is not None)
        with torch.set_grad_enabled(training):
            part = (logprobs or whole_logprobs)(logits_fn(piece), targets[here])
            loss = -exact_sum(coefficients[here], part)
        if len(rows):
            found[here] = part.detach().to(found.dtype)  # some heads answer in fp32 whatever they are asked
        if not loss.requires_grad:
            continue
        if number == 0:
            leaves = [leaf for leaf in _leaves(loss) if leaf is not piece]
            sums = [torch.zeros_like(leaf) for leaf in leaves]
        wanted = ([piece] if piece.requires_grad else []) + leaves
        parts = list(torch.autograd.grad(loss, wanted, allow_unused=True))
        if hidden_gradient is not None:
            hidden_gradient[here] = parts.pop(0)
        for total, part in zip(sums, parts, strict=True):
            if part is not None:
                total += part
    total_loss = -exact_sum(coefficients, found)
    return with_gradients(total_loss, [hidden, *leaves], [hidden_gradient, *sums]), found


def chunked_logprobs(
    logits_fn: LogitsFunction,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk: int = LOGITS_CHUNK,
    logprobs: LogprobsFunction | None = None,
) -> torch.Tensor:
    """Log-probabilities of the targets, whose logits are made again in the backward pass.

    Args:
        logits_fn: the model's own head, [n, hidden] -> [n, vocabulary].
        hidden: [n, hidden]; n may be 0.
        targets: int64 [n], or [n, K] for several at each position.
        chunk: positions at a time.
        logprobs: as of `cross_entropy_from_logits`.

    Returns:
        of the targets' shape, in fp32 (float64 for float64), with gradients for hidden and for everything that
        logits_fn reads and trains.
    """

    def one(piece: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (logprobs or whole_logprobs)(logits_fn(piece), wanted)

    parts = []
    for start in range(0, len(targets), chunk):
        here = slice(start, start + chunk)
        if torch.is_grad_enabled():
            part = checkpoint(one, hidden[here], targets[here], use_reentrant=False)
        else:
            part = one(hidden[here], targets[here])
        parts.append(part)
    if not parts:
        return hidden.sum(1).to(wide_dtype(hidden))
    return torch.cat(parts)


def whole_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of targets [n] or [n, K] from logits [n, vocabulary]."""
    if targets.dim() == 2:
        return logits.to(wide_dtype(logits)).log_softmax(-1).gather(1, targets)
    return -torch.nn.functional.cross_entropy(logits.to(wide_dtype(logits)), targets, reduction="none")


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of the softmax."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def exact_sum(coefficients: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Sum of coefficient * log p in float64 where the device has it."""
    exact = torch.float32 if logprobs.device.type == "mps" else torch.float64
    return torch.dot(coefficients.to(exact), logprobs.to(exact))


def _leaves(output: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a result's gradient flows to, in the order in which they are met."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        stack.extend(following for following, _ in node.next_functions)
    return list(found.values())


def with_gradients(
    loss: torch.Tensor, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """The loss as a function of inputs whose gradients are already known."""
    known = [(tensor, gradient) for tensor, gradient in zip(inputs, gradients, strict=True) if gradient is not None]
    if not known:
        return loss
    return cast(
        torch.Tensor, _Known.apply(loss, *(tensor for tensor, _ in known), *(gradient for _, gradient in known))
    )


class _Known(torch.autograd.Function):
    """Takes a loss, inputs, and as many gradients; hands the gradients on in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[len(tensors) // 2 :])
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.saved_tensors
        factor = grad_outputs[0]
        if factor.device.type != "cpu" or factor.item() != 1.0:  # on the CPU a pass over dW saved is worth the look
            gradients = tuple(gradient * factor.to(gradient.dtype) for gradient in gradients)
        return None, *gradients, *(None for _ in gradients)
