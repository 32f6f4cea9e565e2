"""The loss of a reward model on pairs of texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, weights: Tensor, margins: Tensor, center: float = 0.0) -> Tensor:
    """Sum of w (-log sigmoid(c - r - margin) + center (c + r)^2) (Bradley and Terry 1952; margins: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288; centring: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244).

    Args:
        chosen: [n] scores of the preferred texts, differentiable.
        rejected: [n] of the others.
        weights: [n], the share of each pair.
        margins: [n], by how much the preferred text is to lead.
        center: weight of the square of the sum, which keeps scores near 0.

    Returns:
        scalar in float64.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> round(bradley_terry(zero, zero, one, zero).item(), 4)
    0.6931
    """
    losses = -F.logsigmoid(chosen - rejected - margins) + center * (chosen + rejected).square()
    return (weights.to(losses.dtype) * losses).sum(dtype=torch.float64)
