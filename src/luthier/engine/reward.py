"""Scores of texts, and the loss of pairs of them: each text's last position goes through the model's score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from luthier.batch import Batch
from luthier.engine.hidden import HiddenLoss
from luthier.engine.network import Network, counted
from luthier.engine.state import TrainState
from luthier.hf.forward import hidden_states
from luthier.losses.reward import bradley_terry
from luthier.parallel.fsdp import within


@dataclass(frozen=True)
class Ranking(HiddenLoss):
    """Bradley and Terry's loss of microbatches whose documents are pairs, the preferred text first. Every document has
    one position of weight not 0, which is its pair's share, and the batch a `margin` for each document.

    Attributes:
        center: weight of the square of a pair's sum.
    """

    center: float = 0.0

    def score(
        self, state: TrainState, hidden: torch.Tensor, row: Batch, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `HiddenLoss`; the numbers are the scores, at the positions that they are of."""
        chosen = counted(row)
        found = _scores(state, hidden, chosen)
        values = found.new_zeros(batch.tokens)
        if chosen.numel() == 0:  # whoever shares weights has to take part
            return 0.0 * _scores(state, hidden, chosen.new_zeros(1)).sum(dtype=torch.float64), values
        loss = ranking(found, row.weights[0, chosen], batch.inputs["margin"], self.center)
        return loss, values.index_put((chosen,), found)


@dataclass(frozen=True)
class Weighing(HiddenLoss):
    """Sum of weight x (-score), whose gradient is any function's whose slopes in the scores are minus the weights:
    documents that are compared need not stand in one microbatch."""

    def score(
        self, state: TrainState, hidden: torch.Tensor, row: Batch, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `HiddenLoss`; the numbers are the scores, at the positions that they are of."""
        chosen = counted(row)
        places = chosen if chosen.numel() else chosen.new_zeros(1)  # whoever shares weights has to take part
        found = _scores(state, hidden, places)
        loss = -(row.weights[0, places] * found).sum(dtype=torch.float64)
        return loss, found.new_zeros(batch.tokens).index_put((chosen,), found[: chosen.numel()])


def ranking(scores: torch.Tensor, weights: torch.Tensor, margins: torch.Tensor, center: float) -> torch.Tensor:
    """Bradley and Terry's loss of the documents of a microbatch as `Ranking` takes them.

    Args:
        scores: [documents], differentiable; none of a microbatch that only takes part.
        weights: [documents], a pair's share twice.
        margins: a pair's twice, for each of the documents.
        center: weight of the square of a pair's sum.
    """
    chosen, rejected = scores.view(-1, 2).unbind(1)
    share, margin = (values[: len(scores)].view(-1, 2)[:, 0] for values in (weights, margins.to(scores.dtype)))
    return bradley_terry(chosen, rejected, share, margin, center)


@torch.no_grad()
def scores_of(network: Network, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """The scores [documents] of microbatches as `Ranking` takes them; all ranks call it."""

    def scored(batch: Batch) -> torch.Tensor:
        here = batch.to(network.device)
        chosen = counted(here)
        found = _scores(network, hidden_states(network.model, here), chosen if chosen.numel() else chosen.new_zeros(1))
        return found[: chosen.numel()]

    return [within(network.model, scored, batch) for batch in batches]


def _scores(network: Network, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[n] of the hidden states [positions, hidden] at n places, in fp32, or float64 for a float64 model."""
    score = network.model.score
    found: torch.Tensor = score(hidden[places].to(score.weight.dtype)).squeeze(-1)
    return found.to(network.head.dtype)
