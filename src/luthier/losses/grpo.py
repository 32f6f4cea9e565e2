"""Group-relative policy optimisation: advantages of rewards, and the clipped loss of packed answers.

With l the log-probability of a token now, q the one it was sampled with, p the reference's, A its answer's advantage
and w the weight that its token has in the mean over tokens that is asked for (`token_weights`):

    L = sum of w (-min(r A, clip(r, 1 - low, 1 + high) A) + beta r (exp(p - l) - (p - l) - 1))

with r = exp(l - q) of each token, or at the level of sequences exp(mean of l - q over the answer) (GSPO). The forms are
those of TRL 1.16's GRPOTrainer, and the names of the means are its.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Mean = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
_EPSILON = 1e-4
"""Added to standard deviations, as TRL does."""


def advantages(rewards: Tensor, scale: Literal["group", "batch", "none"], everything: Tensor | None = None) -> Tensor:
    """How much better each answer is than its group.

    Args:
        rewards: float64 [groups, size]; NaN where nothing can be said, which counts nowhere.
        scale: whose standard deviation (of a sample) the differences are divided by.
        everything: all rewards of the step where these are a part of them; these when left out.

    Returns:
        float64 [groups, size], 0 where the reward is NaN; exactly 0 in a group of equal rewards, whose mean is rounded.

    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), "none").tolist()
    [[0.5, -0.5, -0.5, 0.5]]
    """
    found = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        found = found / (deviation(rewards, 1)[:, None] + _EPSILON)
    elif scale == "batch":
        found = found / (deviation((rewards if everything is None else everything).flatten(), 0) + _EPSILON)
    unknown = rewards.isnan()
    highest = rewards.masked_fill(unknown, -torch.inf).amax(1, keepdim=True)
    lowest = rewards.masked_fill(unknown, torch.inf).amin(1, keepdim=True)
    return torch.where(highest > lowest, found, 0.0).nan_to_num(nan=0.0)


def deviation(values: Tensor, dim: int) -> Tensor:
    """The standard deviation of a sample along a dimension, NaN left out; 0 of a single value, or of none."""
    there = ~values.isnan()
    count = there.sum(dim)
    centred = torch.where(there, values - values.nanmean(dim, keepdim=True), 0.0)
    return (centred.square().sum(dim) / (count - 1).clamp(min=1)).sqrt()


def token_weights(mean: Mean, lengths: Sequence[int], answers: int, tokens: int, longest: int) -> list[float]:
    """The weight of each token of some answers in the mean over all tokens of a step.

    Args:
        mean: grpo: the mean over each answer's tokens, then over answers; dapo and bnpo: the mean over all tokens;
            dr_grpo: the sum over `answers` times `longest`.
        lengths: trained tokens of each of these answers.
        answers: of the whole step, those without trained tokens too.
        tokens: trained ones of the whole step.
        longest: most tokens that an answer may have.
    """
    if mean == "grpo":
        return [1.0 / (max(length, 1) * max(answers, 1)) for length in lengths]
    return [1.0 / max(answers * longest if mean == "dr_grpo" else tokens, 1)] * len(lengths)


def log_ratio(logprobs: Tensor, sampled: Tensor, weights: Tensor, cu_seqlens: Tensor, *, sequence: bool) -> Tensor:
    """log r of each token.

    Args:
        logprobs: [T], differentiable.
        sampled: [T], log-probabilities when the tokens were sampled.
        weights: [T], 0 at tokens that are not trained on, whose ratio is 1.
        cu_seqlens: [documents + 1], where each document begins, and T.
        sequence: the mean over each document's trained tokens.
    """
    each = torch.where(weights != 0, logprobs - sampled, 0.0)
    if not sequence:
        return each
    bounds = cu_seqlens.to(torch.int64)
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff())
    sums = each.new_zeros(len(bounds) - 1).index_add(0, document, each)
    counts = each.new_zeros(len(bounds) - 1).index_add(0, document, (weights != 0).to(each.dtype))
    return (sums / counts.clamp(min=1.0))[document]


def grpo(
    logprobs: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float,
    high: float,
    sequence: bool = False,
    reference: Tensor | None = None,
    beta: float = 0.0,
    unbiased: bool = True,
) -> Tensor:
    """The loss of packed answers.

    Args:
        logprobs: [T], differentiable.
        sampled: [T], log-probabilities when the tokens were sampled; `logprobs.detach()` where nothing has changed.
        advantages: [T], the same over each answer.
        weights: [T], of `token_weights`; 0 at tokens that are not trained on.
        cu_seqlens: [documents + 1], where each document begins, and T.
        low: the ratio is clipped below 1 - low.
        high: and above 1 + high.
        sequence: one ratio an answer.
        reference: [T], log-probabilities of the reference model; needed where beta is not 0.
        beta: weight of the divergence from it.
        unbiased: the factor r of the divergence, whose gradient is then that of the reverse KL (DeepSeek-AI 2025,
            https://arxiv.org/abs/2512.02556); off: the divergence alone (Shao et al. 2024).

    Returns:
        scalar in float64.
    """
    ratio = log_ratio(logprobs, sampled, weights, cu_seqlens, sequence=sequence).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if beta:
        assert reference is not None
        gap = divergence(logprobs, reference, weights)
        losses = losses + beta * (gap * ratio if unbiased else gap)
    return (weights.to(losses.dtype) * losses).sum(dtype=torch.float64)


def divergence(logprobs: Tensor, reference: Tensor, weights: Tensor) -> Tensor:
    """[T] estimates of the divergence from the reference, never below 0: exp(p - l) - (p - l) - 1
    (http://joschu.net/blog/kl-approx.html); 0 at tokens that are not trained on."""
    gap = torch.where(weights != 0, reference - logprobs, 0.0)
    return gap.exp() - gap - 1


def clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """bool [T] each: which ratios are clipped below, and which above, so that they have no gradient."""
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
