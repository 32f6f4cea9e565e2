"""Causal attention within each document on the CPU, as batched matrix products.

torch's fused attention for the CPU runs its backward pass far below the rate of plain matrix products. Here documents
of like length (rounded up to a multiple of 32, the padding lies after every real query) form one batch, and blocks of
queries meet only the keys up to their own end. The softmax of a block is one fused kernel over whole rows, so nothing
has to be rescaled; its probabilities are kept for the backward pass, or made again where documents are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch

from luthier.hf.documents import Documents

_GRAIN = 32
"""Lengths are rounded up to this: odd shapes are slow, and each new shape costs the product library a compilation."""
_QUERIES = {torch.bfloat16: 256}
"""Queries of a block; low-precision matrix units want larger products than fp32 does (`_OTHER_QUERIES`)."""
_OTHER_QUERIES = 64
_SCORES = 1 << 21
"""Scores of a batch of documents at a time."""
_KEEP = 512
"""Longest (rounded) documents whose probabilities are kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents of one rounded length: `spans` in the packed row."""

    length: int
    spans: tuple[tuple[int, int], ...]

    def blocks(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Blocks of queries (first, one past the last)."""
        size = _QUERIES.get(dtype, _OTHER_QUERIES)
        return [(start, min(start + size, self.length)) for start in range(0, self.length, size)]

    def gather(self, packed: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """[heads, T, dim] -> contiguous [documents, heads, length, dim], zeros after the end of a document."""
        heads, _, dim = packed.shape
        result = packed.new_zeros(len(self.spans), heads, self.length, dim)
        for place, (start, stop) in enumerate(self.spans):
            own = result[place, :, : stop - start]
            if factor == 1.0:
                own.copy_(packed[:, start:stop])
            else:
                torch.mul(packed[:, start:stop], factor, out=own)
        return result

    def scatter(self, grouped: torch.Tensor, packed: torch.Tensor, factor: float = 1.0) -> None:
        """The inverse of gather: writes into [heads, T, dim]."""
        for place, (start, stop) in enumerate(self.spans):
            own = grouped[place, :, : stop - start]
            if factor == 1.0:
                packed[:, start:stop] = own
            else:
                torch.mul(own, factor, out=packed[:, start:stop])


@lru_cache(maxsize=64)
def _groups(bounds: tuple[int, ...], heads: int) -> tuple[_Group, ...]:
    """Documents by rounded length; a batch has at most about _SCORES scores a block, and at least one document."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(bounds):
        length = -(-(stop - start) // _GRAIN) * _GRAIN
        by_length.setdefault(length, []).append((start, stop))
    groups: list[_Group] = []
    for length, spans in sorted(by_length.items()):
        most = max(1, _SCORES // (heads * min(length, 256) * length))
        groups.extend(_Group(length, tuple(spans[i : i + most])) for i in range(0, len(spans), most))
    return tuple(groups)


@lru_cache(maxsize=32)
def _later(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size, size]: -inf where the key is later than the query, else 0; added, which is faster than a bool mask."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu(1)


@torch.compiler.disable
def blocked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Documents, scaling: float
) -> torch.Tensor:
    """Softmax attention, causal within each document.

    Args:
        query: [1, heads, T, dim].
        key: [1, kv_heads, T, dim].
        value: [1, kv_heads, T, value_dim].
        packed: the documents of the row.
        scaling: factor of the scores.

    Returns:
        [1, T, heads, value_dim], contiguous.
    """
    return cast(torch.Tensor, _Blocked.apply(query, key, value, packed.bounds, scaling))


def _probabilities(query: torch.Tensor, key: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Softmax of a block of queries over the keys up to its end.

    Args:
        query: [documents, kv_heads, groups, length, dim], scaled.
        key: [documents * kv_heads, length, dim].
        first: first query of the block.
        stop: one past the last.

    Returns:
        [documents * kv_heads, groups * (stop - first), stop].
    """
    groups, size = query.shape[2], stop - first
    scores = torch.bmm(_rows(query, first, stop), key[:, :stop].transpose(1, 2))
    diagonal = scores.view(-1, groups, size, stop)[..., first:]
    diagonal.add_(_later(size, scores.dtype))
    return torch.softmax(scores, -1, out=scores)


def _rows(grouped: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """[documents, kv_heads, groups, length, dim] -> contiguous [documents * kv_heads, groups * (stop - first), dim]."""
    documents, kv_heads, groups, _, dim = grouped.shape
    return grouped[:, :, :, first:stop].reshape(documents * kv_heads, groups * (stop - first), dim)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: tuple[int, ...],
        scaling: float,
    ) -> torch.Tensor:
        heads, tokens = query.shape[1:3]
        kv_heads, value_dim = key.shape[1], value.shape[3]
        output = query.new_empty(1, tokens, heads, value_dim)
        by_head = output[0].transpose(0, 1)
        train = any(ctx.needs_input_grad[:3])
        saved: list[torch.Tensor] = []
        kept: list[list[torch.Tensor]] = []
        for group in _groups(bounds, heads):
            q = group.gather(query[0], scaling).unflatten(1, (kv_heads, -1))
            k = group.gather(key[0]).flatten(0, 1)
            v = group.gather(value[0]).flatten(0, 1)
            o = q.new_empty(*q.shape[:4], value_dim)
            probabilities = []
            for first, stop in group.blocks(q.dtype):
                weights = _probabilities(q, k, first, stop)
                part = torch.bmm(weights, v[:, :stop])
                o[:, :, :, first:stop] = part.view(*q.shape[:3], stop - first, value_dim)
                if train and group.length <= _KEEP:
                    probabilities.append(weights)
            group.scatter(o.flatten(1, 2), by_head)
            saved += [q, k, v]
            kept.append(probabilities)
        if train:
            ctx.save_for_backward(*saved, *(p for probabilities in kept for p in probabilities))
            ctx.counts = [len(probabilities) for probabilities in kept]
            ctx.bounds, ctx.scaling, ctx.shapes = bounds, scaling, (query.shape, key.shape, value.shape)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_head = grad_outputs[0][0].transpose(0, 1)
        like = grad_outputs[0]
        d_query, d_key, d_value = (like.new_empty(shape) for shape in ctx.shapes)
        kv_heads = d_key.shape[1]
        groups = _groups(ctx.bounds, d_query.shape[1])
        saved = ctx.saved_tensors
        kept = iter(saved[3 * len(groups) :])
        for number, (group, count) in enumerate(zip(groups, ctx.counts, strict=True)):
            q, k, v = saved[3 * number : 3 * number + 3]
            d_o = group.gather(by_head).unflatten(1, (kv_heads, -1))
            d_q = torch.empty_like(q)
            d_k, d_v = _Sum(k), _Sum(v)
            for first, stop in group.blocks(q.dtype):
                weights = next(kept) if count else _probabilities(q, k, first, stop)
                d_out = _rows(d_o, first, stop)
                d_v.add(torch.bmm(weights.transpose(1, 2), d_out))
                d_weights = torch.bmm(d_out, v[:, :stop].transpose(1, 2))
                d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
                part = torch.bmm(d_scores, k[:, :stop])
                d_q[:, :, :, first:stop] = part.view(*q.shape[:3], stop - first, q.shape[4])
                d_k.add(torch.bmm(d_scores.transpose(1, 2), _rows(q, first, stop)))
            group.scatter(d_q.flatten(1, 2), d_query[0], ctx.scaling)
            group.scatter(d_k.total().view(len(group.spans), kv_heads, group.length, -1), d_key[0])
            group.scatter(d_v.total().view(len(group.spans), kv_heads, group.length, -1), d_value[0])
        return d_query, d_key, d_value, None, None


class _Sum:
    """Sum over blocks of the gradients of the first keys; in fp32 when low precision has more than one block."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.sum: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """part: [batch, up to, dim], for the keys from the first up to some."""
        length = self.like.shape[1]
        if self.sum is None and part.shape[1] == length:
            self.sum = part
            return
        if self.sum is None:
            wide = torch.promote_types(part.dtype, torch.float32)
            self.sum = torch.zeros(self.like.shape, dtype=wide, device=part.device)
        self.sum[:, : part.shape[1]] += part

    def total(self) -> torch.Tensor:
        assert self.sum is not None  # every document has at least one block
        return self.sum
