"""The auxiliary loss that keeps experts equally busy, over everything that is one batch.

L = E sum_e (C_e / N) (P_e / N), with C_e how often expert e was chosen, P_e the sum of its probabilities over all
tokens and layers, and N tokens times layers (Fedus et al. 2021, https://arxiv.org/abs/2101.03961; the layers are pooled
as Transformers' `load_balancing_loss_func` pools them). C has no gradient, so where a batch is computed piece by piece
each piece's gradient needs nothing of the others but C and N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Load:
    """How busy experts were; the sum of two is that of both.

    Attributes:
        chosen: float64 [experts], C.
        probability: float64 [experts], P.
        tokens: float64 scalar, N.
    """

    chosen: Tensor
    probability: Tensor
    tokens: Tensor

    @staticmethod
    def of(logits: Tensor, counted: Tensor, top_k: int) -> Load:
        """The load that one layer's router makes.

        Args:
            logits: [T, experts].
            counted: bool [T], which tokens count; padding does not.
            top_k: experts that each token visits.
        """
        probability = probabilities(logits.detach())
        chosen = torch.zeros_like(probability).scatter_(1, probability.topk(top_k, -1).indices, 1.0)
        mask = counted.to(torch.float64).unsqueeze(1)
        return Load((chosen * mask).sum(0), (probability * mask).sum(0), mask.sum())

    def flat(self) -> Tensor:
        """[2 x experts + 1], so that one sum over ranks does."""
        return torch.cat([self.chosen, self.probability, self.tokens.reshape(1)])

    @staticmethod
    def unflat(values: Tensor) -> Load:
        """What `flat` was called on."""
        experts = (len(values) - 1) // 2
        return Load(values[:experts], values[experts:-1], values[-1])

    def __add__(self, other: Load) -> Load:
        return Load(self.chosen + other.chosen, self.probability + other.probability, self.tokens + other.tokens)

    @property
    def loss(self) -> Tensor:
        """L, a float64 scalar; 0 of nothing."""
        return len(self.chosen) * (self.chosen * self.probability).sum() / self.tokens.clamp(min=1.0).square()

    @property
    def slopes(self) -> Tensor:
        """float64 [experts], dL / dP."""
        return len(self.chosen) * self.chosen / self.tokens.clamp(min=1.0).square()


def probabilities(logits: Tensor) -> Tensor:
    """[T, experts] -> the same in float64, softmax in the dtype that the logits have, as Transformers takes it."""
    return logits.softmax(-1).double()


def logits_gradient(logits: Tensor, counted: Tensor, slopes: Tensor) -> Tensor:
    """The gradient of sum_e slopes_e P_e of one layer.

    Args:
        logits: [T, experts].
        counted: bool [T].
        slopes: float64 [experts].

    Returns:
        [T, experts], in the logits' dtype.
    """
    p = probabilities(logits)
    return (p * (slopes - (p * slopes).sum(-1, keepdim=True)) * counted.unsqueeze(1)).to(logits.dtype)
