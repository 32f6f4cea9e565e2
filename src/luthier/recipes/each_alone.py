"""Losses that compare the documents of a row, for a model that reads one document at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from luthier.batch import Batch
from luthier.data.loader import pack
from luthier.engine.hidden import HiddenLoss
from luthier.engine.state import TrainState
from luthier.engine.step import ForwardBackward, forward_backward_all

WIDTH = 2
"""Documents that a row has at most."""


def each_alone(
    state: TrainState,
    batches: Sequence[Batch],
    ask: Callable[[Sequence[Batch]], list[torch.Tensor]],
    loss: Callable[[torch.Tensor, Batch], torch.Tensor],
    kind: HiddenLoss | None = None,
) -> list[ForwardBackward]:
    """A step's forward and backward: a forward pass of all (without dropout), from which the loss says how much each
    number counts, then forward and backward of each document with these weights.

    Args:
        state: whose gradients grow.
        batches: microbatches of one row each.
        ask: gives the numbers [T] of each microbatch, of any device.
        loss: loss(numbers, batch) -> scalar, on the CPU.
        kind: what sums weight x (-number) of a document; None where the numbers are log-probabilities.
    """
    state.model.eval()
    found = ask(batches)
    state.model.train()
    outputs, pieces = [], []
    for batch, values in zip(batches, found, strict=True):
        here = values.detach().cpu().requires_grad_(True)
        value = loss(here, batch)
        [slope] = torch.autograd.grad(value, here)
        outputs.append(ForwardBackward(value.detach().to(state.device), values))
        pieces += apart(replace(batch, weights=-slope[None].double()))
    forward_backward_all(state, pieces, kind)
    return outputs


def apart(batch: Batch) -> list[Batch]:
    """The documents of a microbatch of one row, each a microbatch of its own; and so many that only take part that all
    ranks have equally many."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    assert len(bounds) <= WIDTH
    found = []
    for number, (start, stop) in enumerate(bounds):
        tokens, places, targets, weights = (
            values[:, start:stop] for values in (batch.input_ids, batch.position_ids, batch.targets, batch.weights)
        )
        ends = torch.tensor([0, stop - start], dtype=torch.int32)
        found.append(Batch(tokens, places, targets, weights, ends, batch.origins[number : number + 1]))
    return found + [pack([]) for _ in range(WIDTH - len(found))]
