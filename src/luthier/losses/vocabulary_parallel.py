"""Cross-entropy over a head whose vocabulary is dealt to several ranks; no rank ever sees another's logits.

Each rank has the same positions and its own rows of the weight. For a chunk of positions three numbers a position go
round, in one gather: the largest logit of a rank's other tokens, the sum of their exponentials, and the target's logit
where the rank has it. With R = sum over v != y of exp(z_v) and e_y = exp(z_y), as in `streaming`,

    log p(y) = -log(1 + R / e_y)        d(-log p) / dz_v = e_v / (R + e_y)        d(-log p) / dz_y = -R / (R + e_y)

and the gradient of the logits stays where the logits are. That of the hidden states is summed over the ranks once.
The split is that of Shoeybi et al. (2019), https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from luthier.losses.chunks import DEFAULT_CHUNK
from luthier.losses.cross_entropy import exact_sum, wide_dtype, with_gradients
from luthier.losses.streaming import LinearHead

_KEPT_BYTES = 256 << 20
"""Scores of a chunk, which are kept until its sums have gone round, are at most this large."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which tokens this rank has logits for.

    Attributes:
        group: the ranks that share the vocabulary, each with the same positions.
        offset: the first token.
        size: tokens in the whole vocabulary.
    """

    group: dist.ProcessGroup
    offset: int
    size: int

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of the targets from this rank's logits. All ranks call it, backward too.

        Args:
            logits: [n, own tokens].
            targets: int64 [n], of the whole vocabulary, or [n, K] for several at each position.

        Returns:
            of the targets' shape, in fp32 (float64 for float64), the same on all ranks; the gradient is that of the own
            logits.
        """
        if targets.dim() == 2:
            return torch.stack([self.logprobs(logits, column) for column in targets.unbind(1)], 1)
        return cast(Tensor, _Logprobs.apply(logits, targets, self))


def vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    local_weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shard: VocabularyShard,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Sum of coefficient * -log p(target) for a linear head, with its gradient made on the way. All ranks call it.

    Args:
        hidden: [n, hidden], the same on all ranks; n may be 0.
        local_weight: [own tokens, hidden], this rank's rows, in the dtype of hidden.
        targets: int64 [n], of the whole vocabulary.
        coefficients: [n], any sign; positions with 0 are left out.
        shard: which tokens the rows are.
        bias: [own tokens] or None.
        scale: factor on the logits.
        soft_cap: cap on the scaled logits.
        chunk: positions at a time at most.

    Returns:
        the loss, a scalar in float64, and the log-probabilities [n] in fp32 (float64 for float64), 0 at positions that
        were left out; both the same on all ranks. The loss has gradients for weight and bias, each rank its own, and
        for hidden, summed over the ranks.
    """
    inputs = [hidden, local_weight] if bias is None else [hidden, local_weight, bias]
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs]
    with torch.no_grad():
        head = LinearHead(local_weight.detach(), None if bias is None else bias.detach(), scale, soft_cap)
        rows = coefficients.nonzero()[:, 0]
        chosen, chosen_targets, factors = hidden[rows], targets[rows], coefficients[rows]
        sums = [torch.zeros_like(tensor) if want else None for tensor, want in zip(inputs, wants, strict=True)]
        d_chosen = torch.zeros_like(chosen) if wants[0] else None
        found = torch.zeros(len(targets), dtype=wide_dtype(hidden), device=hidden.device)
        chunk = max(16, min(chunk, _KEPT_BYTES // max(1, len(local_weight) * hidden.element_size())))
        for start in range(0, len(rows), chunk):
            here = slice(start, start + chunk)
            piece, factor = chosen[here], factors[here, None]
            logits = torch.empty(len(piece), len(local_weight), dtype=hidden.dtype, device=hidden.device)
            head.logits(piece, head.weight, head.bias, logits)
            slope = head.slope(logits) if any(wants) else None
            found[rows[here]], scores = _softmax(logits, chosen_targets[here], shard)
            if not any(wants):
                continue
            scores.mul_((factor * scale).to(scores.dtype))
            if slope is not None:
                scores.mul_(slope)
            if d_chosen is not None:
                torch.mm(scores, head.weight, out=d_chosen[here])
            if sums[1] is not None:
                sums[1].addmm_(scores.t(), piece)
            if bias is not None and sums[2] is not None:
                sums[2] += scores.sum(0)
        loss = -exact_sum(coefficients, found)
        if d_chosen is not None:
            dist.all_reduce(d_chosen, group=shard.group)
            sums[0] = sums[0].index_copy_(0, rows, d_chosen) if sums[0] is not None else None
    return (with_gradients(loss, inputs, sums) if any(wants) else loss), found


def _softmax(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n] of the targets, and the gradient of -log p for the own logits, in the place of the logits.

    The target is left out of the sums: p - 1 would cancel for confident tokens.
    """
    wide = wide_dtype(logits)
    own = targets - shard.offset
    rows = ((own >= 0) & (own < logits.shape[1])).nonzero()[:, 0]
    places = own[rows]
    target = torch.full((len(logits),), -torch.inf, dtype=wide, device=logits.device)
    target[rows] = logits[rows, places].to(wide)
    logits[rows, places] = -torch.inf
    if logits.shape[1]:
        largest = logits.amax(1, keepdim=True)
        largest = torch.where(largest.isneginf(), 0.0, largest)  # nothing but the target here
    else:
        largest = logits.new_zeros(len(logits), 1)  # more ranks than tokens
    scores = logits.sub_(largest).exp_()
    mine = torch.stack([largest[:, 0].to(wide), scores.sum(1, dtype=wide), target])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(everyone, mine, group=shard.group)
    shifts, sums, targets_there = torch.stack(everyone).unbind(1)  # [ranks, n] each
    target = targets_there.amax(0)
    rest = torch.logsumexp(shifts + sums.log(), 0)
    excess = rest - target  # log(R / e_y)
    logprobs = -torch.logaddexp(torch.zeros_like(excess), excess)
    total = torch.logaddexp(rest, target)
    scores.mul_((largest[:, 0].to(wide) - total).exp()[:, None].to(scores.dtype))
    scores[rows, places] = -(rest - total).exp()[rows].to(scores.dtype)
    return logprobs, scores


class _Logprobs(torch.autograd.Function):
    """`_softmax` as an operation on logits that came from anywhere."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
        logprobs, gradient = _softmax(logits.to(wide_dtype(logits), copy=True), targets, shard)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return -gradient * gradients[0][:, None].to(gradient.dtype), None, None
