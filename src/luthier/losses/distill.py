"""How far a student's distribution is from a teacher's, at each position: over the whole vocabulary, over a part of it
that this rank has, or over the teacher's likeliest tokens.

With P the teacher's distribution, Q the student's and M = beta P + (1 - beta) Q:

| divergence | of a position |
| --- | --- |
| forward | KL(P, Q) = sum P log(P / Q) |
| reverse | KL(Q, P) |
| symmetric | (KL(P, Q) + KL(Q, P)) / 2 |
| jsd | beta KL(P, M) + (1 - beta) KL(Q, M) |

Forward makes the student cover what the teacher would say (Hinton et al. 2015, https://arxiv.org/abs/1503.02531),
reverse keeps it to that (Gu et al. 2023, https://arxiv.org/abs/2306.08543). jsd is that of Agarwal et al. 2023
(https://arxiv.org/abs/2306.13649) and of TRL 1.16: beta 0 is taken to be forward and beta 1 reverse, its limits divided
by beta (1 - beta).
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from luthier.losses.cross_entropy import wide_dtype

Divergence = Literal["forward", "reverse", "symmetric", "jsd"]
_NEVER = 1e-7
"""The rest of a distribution is at least this likely, as in TRL: the logarithm of 0 has no gradient."""


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """How far distributions are apart.

    Args:
        student: [n, m] log-probabilities, differentiable.
        teacher: [n, m] log-probabilities.
        kind: of the table above.
        beta: of jsd, from 0 to 1.

    Returns:
        [n] in nats; of a part of the vocabulary the part's share of the sum.

    >>> equal = torch.tensor([[0.5, 0.5]]).log()
    >>> divergence(equal, equal, "jsd").tolist()
    [0.0]
    """
    if kind == "forward" or (kind == "jsd" and beta == 0.0):
        return _kl(teacher, student)
    if kind == "reverse" or (kind == "jsd" and beta == 1.0):
        return _kl(student, teacher)
    if kind == "symmetric":
        return 0.5 * (_kl(teacher, student) + _kl(student, teacher))
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """sum exp(left) (left - right), where what is never said counts nothing."""
    chances = left.exp()
    return (chances * torch.where(chances > 0, left - right, 0.0)).sum(-1)


def with_rest(logprobs: Tensor) -> Tensor:
    """[n, k] log-probabilities of some tokens -> [n, k + 1], the last that of all other tokens together."""
    some = logprobs.logsumexp(-1, keepdim=True).clamp(max=-_NEVER)
    return torch.cat([logprobs, (-torch.expm1(some)).log()], -1)


def shared_log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Log-probabilities of this rank's part of the vocabulary, or of all of it without a group.

    All ranks of the group call it, backward too.

    Args:
        logits: [n, own tokens].
        group: the ranks that share the vocabulary.
    """
    wide = logits.to(wide_dtype(logits))
    if group is None:
        return wide.log_softmax(-1)
    largest = wide.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return wide - largest - summed((wide - largest).exp().sum(-1, keepdim=True), group, gradients=True).log()


def summed(values: Tensor, group: dist.ProcessGroup | None, *, gradients: bool = False) -> Tensor:
    """The sum over the ranks of a group, or the values themselves without one; all ranks call it.

    Args:
        values: of one shape on all ranks.
        group: the ranks.
        gradients: their gradients are summed too, since each rank makes something else of the sum; off where all ranks
            make the same of it.
    """
    return values if group is None else cast(Tensor, _Summed.apply(values, group, gradients))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, gradients: bool) -> Tensor:
        ctx.group, ctx.gradients = group, gradients
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        if ctx.gradients:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None
