"""Losses of preferences: functions of the log-probabilities of whole answers, under the model and under a reference.

With pi the model, ref the reference, x a prompt, y+ the preferred and y- the other answer, log pi(y | x) the sum of its
tokens' log-probabilities, |y| their number, and sigma the logistic function:

| loss | of a pair |
| --- | --- |
| sigmoid | -(1 - e) log sigma(b m) - e log sigma(-b m) |
| hinge | max(0, 1 - b m) |
| ipo | (m' - 1 / (2 b))^2 |
| robust | (-(1 - e) log sigma(b m) + e log sigma(-b m)) / (1 - 2 e) |
| simpo | -(1 - e) log sigma(b d' - g) - e log sigma(g - b d') |
| odds_ratio | -log sigma(log odds(y+) - log odds(y-)), odds of the mean log-probability |

m = log pi(y+) / ref(y+) - log pi(y-) / ref(y-); m' the same with each side divided by |y|; d' the difference of mean
log-probabilities; b beta, e the label smoothing, g gamma. Every function gives a loss an answer or a pair: whoever
calls divides by the number of pairs of the whole global batch.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

PairLoss = Literal["sigmoid", "ipo", "hinge", "robust"]


def document_sums(values: torch.Tensor, weights: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum of weight x value over each document, in float64.

    Args:
        values: [T], differentiable.
        weights: [T].
        cu_seqlens: [documents + 1], where each document begins, and T.

    Returns:
        float64 [documents].
    """
    bounds = cu_seqlens.to(torch.int64)
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff())
    weighted = torch.where(weights != 0, values, 0.0).double() * weights.double()
    return weighted.new_zeros(len(bounds) - 1).index_add(0, document, weighted)


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    beta: float,
    loss: PairLoss = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Direct preference optimisation and its kin, as of the table above.

    Sources: sigmoid Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290); with label smoothing the conservative DPO
    of Mitchell 2023 (https://ericmitchell.ai/cdpo.pdf); hinge Zhao et al. 2023 (https://arxiv.org/abs/2305.10425) in
    the form of Liu et al. 2023 (https://arxiv.org/abs/2309.06657); ipo Azar et al. 2023
    (https://arxiv.org/abs/2310.12036), over means of tokens, as its authors told TRL; robust Chowdhury et al. 2024
    (https://arxiv.org/abs/2403.00409).

    >>> gain = torch.zeros(1, dtype=torch.float64)
    >>> round(dpo(gain, gain, beta=0.1).item(), 4)  # log 2: nothing has changed yet
    0.6931

    Args:
        chosen: [pairs], log pi(y+) - log ref(y+), differentiable.
        rejected: [pairs], the same of y-.
        beta: how strongly the model is held to the reference.
        loss: which of them.
        label_smoothing: share of pairs taken to be the wrong way round (sigmoid, robust).
        lengths: tokens of each y+ and of each y- (ipo).

    Returns:
        [pairs].
    """
    margin = beta * (chosen - rejected)
    match loss:
        case "sigmoid":
            return _smoothed(margin, label_smoothing)
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":
            assert lengths is not None
            return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * beta)).square()
        case "robust":
            clean = -(1 - label_smoothing) * F.logsigmoid(margin) + label_smoothing * F.logsigmoid(-margin)
            return clean / (1 - 2 * label_smoothing)


def simpo(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Simple preference optimisation (Meng et al. 2024, https://arxiv.org/abs/2405.14734), without a reference.

    Args:
        chosen: [pairs], mean log-probability of the tokens of y+, differentiable.
        rejected: [pairs], the same of y-.
        beta: scale of both.
        gamma: the margin that y+ is to have.
        label_smoothing: share of pairs taken to be the wrong way round.

    Returns:
        [pairs].
    """
    return _smoothed(beta * (chosen - rejected) - gamma, label_smoothing)


_NEVER_CERTAIN = -1e-7
"""Odds of an answer that is certain, to the last bit of fp32, would be infinite."""


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The part of ORPO that compares (Hong et al. 2024, equation 7, https://arxiv.org/abs/2403.07691).

    odds(y) = p / (1 - p) with log p the mean log-probability of its tokens.

    Args:
        chosen: [pairs], mean log-probability of the tokens of y+, differentiable, below 0.
        rejected: [pairs], the same of y-.

    Returns:
        [pairs].
    """
    chosen, rejected = (values.clamp(max=_NEVER_CERTAIN) for values in (chosen, rejected))
    return -F.logsigmoid((chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected)))


def kto(
    gains: torch.Tensor,
    good: torch.Tensor,
    divergence: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equation 8, https://arxiv.org/abs/2402.01306).

    w+ (1 - sigma(b (gain - z))) of a good answer, w- (1 - sigma(b (z - gain))) of a bad one.

    Args:
        gains: [answers], log pi(y) - log ref(y), differentiable.
        good: bool [answers].
        divergence: z, scalar: how far the model is from the reference, 0 or more (`kl_estimate`).
        beta: how strongly the model is held to the reference.
        desirable_weight: w+.
        undesirable_weight: w-.

    Returns:
        [answers].
    """
    z = divergence.detach()
    sign = torch.where(good, 1.0, -1.0)
    weight = torch.where(good, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-beta * sign * (gains - z))


def kl_estimate(total: float, answers: float) -> float:
    """z of KTO: the mean gain of answers to other prompts, at least 0, as the paper and TRL estimate it.

    Args:
        total: sum over the global batch of log pi(y' | x) - log ref(y' | x), y' an answer to another prompt than x.
        answers: how many; 0 for none.

    >>> kl_estimate(-3.0, 2), kl_estimate(float("nan"), 2)
    (0.0, nan)
    """
    return max(total / answers, 0.0) if answers else 0.0  # in this order what is no number stays none


def _smoothed(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    if not smoothing:
        return -F.logsigmoid(margin)
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, of which the part that keeps its digits (Maechler 2012) is taken."""
    near = value > -0.6931471805599453
    # the side that is not taken is given a harmless number, for its gradient would be no number times 0
    close = torch.where(near, value, -0.5)
    far = torch.where(near, -1.0, value)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
