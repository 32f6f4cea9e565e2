"""Losses of policies: functions of log-probabilities, what was sampled with which probability, and advantages.

Every loss here is a plain sum over tokens and documents; who wants a mean divides the advantages. With l the
log-probability of a token now (at temperature 1), q the one it was sampled with, A its advantage, r = exp(l - q) and
sg a value through which no gradient flows:

| loss | L |
| --- | --- |
| importance_sampling | - sum r A |
| ppo | - sum min(r A, clip(r, low, high) A) |
| cispo | - sum sg(clip(r, low, high)) l A |
| dro | - sum (l A - beta / 2 (l - q)^2) |
| gspo | - sum min(s A, clip(s, low, high) A), s = exp(mean of sg l - q over the document's mask) exp(l - sg l) |

The forms are those that the `tinker` SDK 0.38 documents. Where clip changes nothing, a tie of the
two sides of min included, the gradient is that of the unclipped side. A token of advantage 0 adds exactly nothing,
whatever its q is, except to dro.
"""

from __future__ import annotations

import torch


def importance_sampling(logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """- sum r A: the policy gradient, corrected for having sampled from another policy.

    Args:
        logprobs: [T], differentiable.
        sampled: [T], the log-probabilities that the tokens were sampled with.
        advantages: [T].

    Returns:
        scalar in float64.
    """
    return _sum(-_ratio(logprobs, sampled, advantages) * advantages)


def ppo(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """- sum min(r A, clip(r, low, high) A) (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

    Args:
        logprobs: [T], differentiable.
        sampled: [T], the log-probabilities that the tokens were sampled with.
        advantages: [T].
        low: lower bound of the ratio itself (0.8, not 0.2).
        high: its upper bound.

    Returns:
        scalar in float64.
    """
    ratio = _ratio(logprobs, sampled, advantages)
    return _sum(-torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages))


def cispo(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """- sum sg(clip(r, low, high)) l A (MiniMax 2025, https://arxiv.org/abs/2506.13585): every token keeps a gradient.

    Args:
        logprobs: [T], differentiable.
        sampled: [T], the log-probabilities that the tokens were sampled with.
        advantages: [T].
        low: lower bound of the ratio itself.
        high: its upper bound.

    Returns:
        scalar in float64.
    """
    ratio = _ratio(logprobs, sampled, advantages).detach().clamp(low, high)
    return _sum(-ratio * logprobs * advantages)


def dro(logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, beta: float) -> torch.Tensor:
    """- sum (l A - beta / 2 (l - q)^2) (Richemond et al. 2024, https://arxiv.org/abs/2405.19107).

    Args:
        logprobs: [T], differentiable.
        sampled: [T], the log-probabilities that the tokens were sampled with.
        advantages: [T].
        beta: how strongly the policy is held to the one that sampled.

    Returns:
        scalar in float64.
    """
    return _sum(0.5 * beta * (logprobs - sampled).square() - logprobs * advantages)


def gspo(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    low: float,
    high: float,
) -> torch.Tensor:
    """- sum min(s_t A, clip(s_t, low, high) A), s_t of the value of the document's mean ratio and the gradient of the
    token's (Zheng et al. 2025, "GSPO-token", https://arxiv.org/abs/2507.18071).

    Args:
        logprobs: [T], differentiable.
        sampled: [T], the log-probabilities that the tokens were sampled with.
        advantages: [T].
        mask: [T] of 0 and 1, the tokens that a document's mean is of; of a document without any the ratio is 1.
        cu_seqlens: [documents + 1], where each document begins, and T.
        low: lower bound of the ratio itself.
        high: its upper bound.

    Returns:
        scalar in float64.
    """
    bounds = cu_seqlens.to(torch.int64)
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff())
    now = logprobs.detach()
    sums = now.new_zeros(2, len(bounds) - 1)
    sums[0].index_add_(0, document, torch.where(mask != 0, now - sampled, 0.0))
    sums[1].index_add_(0, document, mask.to(now.dtype))
    mean = sums[0] / sums[1].clamp(min=1.0)
    ratio = mean.exp()[document] * (logprobs - now).exp()
    ratio = torch.where(advantages != 0, ratio, 1.0)
    return _sum(-torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages))


def weighted_cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """- sum w l, of any sign of w.

    Args:
        logprobs: [T], or [T, K] for K targets at each position.
        weights: of the same shape.

    Returns:
        scalar in float64.
    """
    return _sum(-torch.where(weights != 0, logprobs, 0.0).double() * weights.double())


def _ratio(logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """exp(l - q), 1 where the advantage is 0: there q may be anything, and infinity times 0 is no number."""
    return torch.where(advantages != 0, logprobs - sampled, 0.0).exp()


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(dtype=torch.float64)
