"""The training step. There is no other one: the recipes, the API and the jobs all call these functions.

`forward_backward` adds the gradient of one microbatch to what is there; `optim_step` turns the sum into new weights.
Both return what they measured and decide nothing about what is printed, saved or skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from luthier.batch import Batch
from luthier.engine.guards import first_bad_gradient
from luthier.engine.hidden import HiddenLoss
from luthier.engine.network import counted, held, require_readable, summed, whole
from luthier.engine.prefixes import Shared, laid, read_off, shared_of
from luthier.engine.state import TrainState
from luthier.errors import ConfigError
from luthier.hf.forward import hidden_states
from luthier.hf.vision.seeing import eyes_open
from luthier.parallel.fsdp import within
from luthier.parallel.norm import gradient_norm, norm_of, settle
from luthier.parallel.pipeline import Pipeline

LossFunction = Callable[[torch.Tensor, Batch], torch.Tensor] | HiddenLoss
"""loss(logprobs, batch) -> scalar. `logprobs` [T] or [T, K] holds log p(target) where the weight is not 0, else 0. Or
what reads hidden states (`engine.hidden`)."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """What one microbatch gave.

    Attributes:
        loss: scalar, the sum of weight x (-log p(target)), or what a loss function of one's own returned.
        logprobs: [T] or [T, K] log-probabilities of the targets, fp32 or wider; 0 where the weight is 0, unless those
            too were asked for.
    """

    loss: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class OptimStep:
    """What an optimizer step did.

    Attributes:
        gradient_norm: 2-norm of all gradients together, before clipping.
        applied: False when loss or norm was not finite: weights and moments are then as before, the gradients are gone.
        bad_gradient: name of the first parameter whose gradient was not finite.
    """

    gradient_norm: float
    applied: bool
    bad_gradient: str | None = None


def forward_backward(state: TrainState, batch: Batch, loss: LossFunction | None = None) -> ForwardBackward:
    """`forward_backward_all` of one microbatch."""
    return forward_backward_all(state, [batch], loss)[0]


def forward_backward_all(
    state: TrainState,
    batches: Sequence[Batch],
    loss: LossFunction | None = None,
    *,
    all_logprobs: bool = False,
    share_prefixes: bool = False,
) -> list[ForwardBackward]:
    """Run microbatches forward and backward, adding their gradients to those already there.

    The loss is a plain sum, so the weights of all microbatches of a step must together be normalised once, by the
    weight of the whole global batch (`batch.scaled(1 / total)`); microbatches and ranks then just add up.
    Positions of weight 0 never reach the head. A microbatch without trained positions adds exactly nothing.

    On a layout every rank calls this with equally many microbatches, those of one data rank with the same ones. What
    comes back is this data rank's part; `state.mesh.sum` of the losses is the loss of all.

    Args:
        state: whose model runs and whose gradients grow.
        batches: microbatches on any device.
        loss: a loss of one's own, of log-probabilities or of hidden states; weighted cross-entropy when left out, which
            takes one target a position.
        all_logprobs: give log-probabilities of targets of weight 0 as well, for a forward pass of the head on these.
        share_prefixes: run what the documents of a row begin with once, where this model can (`prefixes.py`).

    Raises:
        ModelError: a batch holds several documents, and this architecture would let them see one another.
        DataError: a token is outside the model's vocabulary, or a document is longer than its positions.
    """
    for batch in batches:
        require_readable(state, batch)
    ways = shared_of(state, batches, share_prefixes)
    here = [batch.to(state.device) for batch in batches]
    if state.balance is None:
        return _run(state, here, ways, loss, all_logprobs)
    at_once = state.pipeline is None and len(here) == 1  # all forward passes are over when the first goes backward
    if not at_once and state.balance.coefficient:
        with state.balance.counting():
            _count(state, here)
    with state.balance.training(counts=at_once):
        return _run(state, here, ways, loss, all_logprobs)


def _run(
    state: TrainState,
    batches: list[Batch],
    ways: list[Shared | None],
    loss: LossFunction | None,
    all_logprobs: bool,
) -> list[ForwardBackward]:
    if state.pipeline is not None:
        return _through_stages(state, state.pipeline, batches, ways, loss, all_logprobs)
    found = []
    for left, (batch, way) in zip(reversed(range(len(batches))), zip(batches, ways, strict=True), strict=True):
        early = state.in_backward if not left else None  # the last one completes the gradients
        with early.armed() if early is not None else nullcontext():
            found.append(_forward_backward(state, batch, way, loss, all_logprobs))
    return found


def _count(state: TrainState, batches: list[Batch]) -> None:
    """Run the layers alone, for what is seen of their routers on the way."""
    rows = [held(state, batch.padded(state.row_multiple)) for batch in batches]
    if state.pipeline is None:
        for row in rows:
            within(state.model, hidden_states, state.model, row)
    else:
        nothing = torch.zeros(1, dtype=state.head.dtype, device=state.device)
        state.pipeline.forward(rows, lambda hidden, row, number: (nothing.squeeze(0), nothing))


def _forward_backward(
    state: TrainState, batch: Batch, way: Shared | None, loss: LossFunction | None, all_logprobs: bool
) -> ForwardBackward:
    if state.mesh is None and state.balance is None and not batch.weights.any():
        zero = torch.zeros((), dtype=state.head.dtype, device=state.device)
        logprobs = torch.zeros(batch.targets.shape[1:], dtype=state.head.dtype, device=state.device)
        if all_logprobs:
            with torch.no_grad():
                logprobs = _told(state, hidden_states(state.model, batch), batch, logprobs)
        return ForwardBackward(zero, logprobs)
    value, logprobs = within(state.model, _loss, state, batch, way, loss, all_logprobs)
    if state.balance is not None and state.balance.counts:
        state.balance.settle()
    value.backward()
    return ForwardBackward(value.detach(), logprobs.detach())


def _through_stages(
    state: TrainState,
    pipeline: Pipeline,
    batches: list[Batch],
    ways: list[Shared | None],
    loss: LossFunction | None,
    all_logprobs: bool,
) -> list[ForwardBackward]:
    def score(hidden: torch.Tensor, row: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number >= len(batches):
            return _score(state, hidden, row, row, None, False)
        hidden, row = read_off(hidden, row, batches[number], ways[number])
        return _score(state, hidden, row, batches[number], loss, all_logprobs)

    rows = [laid(state, batch, way, state.row_multiple) for batch, way in zip(batches, ways, strict=True)]
    return [ForwardBackward(*found) for found in pipeline.forward_backward(rows, score)]


def _loss(
    state: TrainState, batch: Batch, way: Shared | None, loss: LossFunction | None, all_logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a microbatch and its log-probabilities [T]; on a layout all ranks run it, each with its part."""
    row = laid(state, batch, way, state.row_multiple)
    with eyes_open(state.model) if state.mesh is not None else nullcontext():
        found = hidden_states(state.model, row)
    hidden, row = read_off(found, row, batch, way)
    return _score(state, hidden, row, batch, loss, all_logprobs)


def _score(
    state: TrainState, hidden: torch.Tensor, row: Batch, batch: Batch, loss: LossFunction | None, all_logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the hidden states of a padded row, or of this rank's part of it, to the microbatch's loss and
    log-probabilities [T] or [T, K]."""
    if isinstance(loss, HiddenLoss):
        return loss.score(state, hidden, row, batch)
    weights = row.weights[0]
    chosen = counted(row)  # [n], none of them in the padding
    if chosen.numel() == 0:  # whoever shares weights has to take part in every collective, so with a position that
        chosen = chosen.new_zeros(1)  # counts nothing
    picked = hidden[chosen]  # [n, hidden]
    targets = row.targets[0, chosen].clamp(min=0)  # [n] or [n, K]
    if loss is None:
        # The coefficients are known, so the head makes its gradient in the forward pass.
        value, logprobs = state.head.cross_entropy(picked, targets, weights[chosen])
        full = _scatter(logprobs, chosen, row.tokens)
        if all_logprobs:
            full = _told(state, hidden, row, full)
        return summed(state, value), whole(state, full, batch)
    # The coefficients come later, from the loss.
    logprobs = state.head.logprobs(picked, targets)
    full = _scatter(logprobs.where(weights[chosen] != 0, 0.0 * logprobs), chosen, row.tokens)
    counting = whole(state, full, batch)
    told = whole(state, _told(state, hidden, row, full), batch) if all_logprobs else counting
    return loss(counting, batch), told


@torch.no_grad()
def _told(state: TrainState, hidden: torch.Tensor, row: Batch, found: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every target of a row, or of this rank's part of it, from those of weight that is not 0."""
    targets = row.targets[0]
    rest = (row.weights[0] == 0) & (targets >= 0)
    chosen = rest.reshape(row.tokens, -1).any(1).nonzero().squeeze(-1)
    found = found.detach().clone()
    if chosen.numel():
        others = state.head.logprobs(hidden[chosen], targets[chosen].clamp(min=0)).to(found.dtype)
        found[chosen] = torch.where(rest[chosen], others, found[chosen])
    return found


def optim_step(
    state: TrainState,
    *,
    loss: float = 0.0,
    learning_rate_factor: float = 1.0,
    max_gradient_norm: float | None = None,
    counts: bool = True,
) -> OptimStep:
    """Clip, update, clear the gradients and count the step.

    Args:
        state: whose weights change.
        loss: of this step, the whole one on every rank; when it is not finite nothing is applied, whatever the
            gradients are.
        learning_rate_factor: multiplies the configured learning rate of every parameter group (a schedule's value).
        max_gradient_norm: gradients are scaled so that their norm is at most this; None for no clipping.
        counts: off: the caller makes one step of several updates, of which this is not the last.
    """
    trainable = state.trainable
    if state.mesh is not None:
        settle(trainable.values())
    counted = list(trainable.values())
    if state.pipeline is not None:
        state.pipeline.settle()
        counted = [parameter for name, parameter in trainable.items() if name not in state.pipeline.copies]
    if state.in_backward is not None:  # most weights have changed already
        if max_gradient_norm is not None:
            remedy = "give no max_gradient_norm, or leave optimizer.in_backward out"
            raise ConfigError("weights are updated before the norm is known", where="max_gradient_norm", remedy=remedy)
        state.in_backward.rest()
        norm = norm_of(state.in_backward.squares(), state.mesh)
    else:
        norm = gradient_norm(counted, state.mesh)
    finite = bool(torch.isfinite(norm)) and math.isfinite(loss)
    bad = None
    if finite and state.in_backward is None:
        clip = min(1.0, max_gradient_norm / float(norm)) if max_gradient_norm is not None and norm > 0 else 1.0
        set_learning_rate(state, learning_rate_factor)
        state.optimizer.step(gradient_factor=clip)
    elif not finite:
        bad = first_bad_gradient(trainable)
        state.counters.skipped_steps += 1
    if state.balance is not None:
        state.balance.move_biases(applied=finite)
    state.optimizer.zero_grad(set_to_none=True)
    state.counters.step += counts
    return OptimStep(float(norm), finite, bad)


def set_learning_rate(state: TrainState, factor: float) -> None:
    """Multiply the configured learning rate of every parameter group; before the backward pass for those in it."""
    for group in state.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def _scatter(values: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """[n, ...] values at `positions` of a zero [length, ...] tensor, differentiable in the values."""
    return values.new_zeros(length, *values.shape[1:]).index_put((positions,), values)
