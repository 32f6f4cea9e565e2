"""Losses that read more than log-probabilities of targets: from hidden states to a number, by a rule of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from luthier.batch import Batch

if TYPE_CHECKING:
    from luthier.engine.state import TrainState


class HiddenLoss(ABC):
    """What `forward_backward_all` takes in the place of a function of log-probabilities."""

    @abstractmethod
    def score(
        self, state: TrainState, hidden: torch.Tensor, row: Batch, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a microbatch; of a pipeline the last stage calls it, of any other layout all ranks do.

        Args:
            state: what trains.
            hidden: [positions, hidden] of `row`.
            row: the padded microbatch, or this rank's part of it.
            batch: the microbatch.

        Returns:
            the loss, a scalar, differentiable in this rank's part; and a number for each position [T] of the batch, not
            finite where a row is at fault (`ForwardBackward.logprobs`).
        """
