"""Causal attention within each document on the CPU, as batched matrix products.

torch's fused attention for the CPU runs its backward pass far below the rate of plain matrix products. Here documents
of like length (rounded up to a multiple of 32, the padding lies after every real query) form one batch, and blocks of
queries meet only the keys up to their own end. Keys of a beginning that documents share lie before their own, with the
padding in front. The softmax of a block is one fused kernel over whole rows, so nothing
has to be rescaled; its probabilities are kept for the backward pass, or made again where documents are long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch

from luthier.hf.rows.documents import Documents

_GRAIN = 32
"""Lengths are rounded up to this: odd shapes are slow, and each new shape costs the product library a compilation."""
_QUERIES = {torch.bfloat16: 256}
"""Queries of a block; low-precision matrix units want larger products than fp32 does (`_OTHER_QUERIES`)."""
_OTHER_QUERIES = 64
_SCORES = 1 << 21
"""Scores of a batch of documents at a time."""
_KEEP = 512
"""Longest (rounded) documents whose probabilities are kept for the backward pass; of others those that are no more."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents of one rounded length: `spans` in the packed row, and `befores` of what each goes on from, (0, 0) for
    none, of the rounded length `before`."""

    length: int
    spans: tuple[tuple[int, int], ...]
    before: int = 0
    befores: tuple[tuple[int, int], ...] = ()

    @property
    def keys(self) -> int:
        """Keys that the last query meets."""
        return self.before + self.length

    @property
    def kept(self) -> bool:
        """Whether the probabilities are kept for the backward pass."""
        return self.length * self.keys <= _KEEP * _KEEP

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

    def gather_keys(self, packed: torch.Tensor) -> torch.Tensor:
        """[heads, T, dim] -> [documents, heads, before + length, dim]: what each goes on from ends at `before`."""
        if not self.before:
            return self.gather(packed)
        heads, _, dim = packed.shape
        result = packed.new_zeros(len(self.spans), heads, self.keys, dim)
        for place, ((start, stop), (begin, end)) in enumerate(zip(self.spans, self.befores, strict=True)):
            result[place, :, self.before - (end - begin) : self.before] = packed[:, begin:end]
            result[place, :, self.before : self.before + stop - start] = packed[:, start:stop]
        return result

    def hidden(self, like: torch.Tensor, kv_heads: int) -> torch.Tensor | None:
        """[documents * kv_heads, 1, most]: -inf for keys that only fill a beginning up; None where there are none."""
        missing = [self.before - (end - begin) for begin, end in self.befores]
        if not any(missing):
            return None
        hidden = like.new_zeros(len(missing), max(missing))
        for place, count in enumerate(missing):
            hidden[place, :count] = -torch.inf
        return hidden.repeat_interleave(kv_heads, 0)[:, None]

    def scatter(self, grouped: torch.Tensor, packed: torch.Tensor, factor: float = 1.0) -> None:
        """The inverse of gather: writes into [heads, T, dim]."""
        for place, (start, stop) in enumerate(self.spans):
            own = grouped[place, :, : stop - start]
            if factor == 1.0:
                packed[:, start:stop] = own
            else:
                torch.mul(own, factor, out=packed[:, start:stop])

    def add_keys(self, grouped: torch.Tensor, packed: torch.Tensor) -> None:
        """The inverse of gather_keys, adding: several documents go on from one."""
        for place, (start, stop) in enumerate(self.spans):
            packed[:, start:stop] += grouped[place, :, self.before : self.before + stop - start]
        for place, (begin, end) in enumerate(self.befores):
            packed[:, begin:end] += grouped[place, :, self.before - (end - begin) : self.before]


@lru_cache(maxsize=64)
def _groups(bounds: tuple[int, ...], heads: int, parents: tuple[int, ...] = ()) -> tuple[_Group, ...]:
    """Documents by rounded length; a batch has at most about _SCORES scores a block, and at least one document."""
    spans = list(pairwise(bounds))
    by_length: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for (start, stop), parent in zip(spans, parents or (-1,) * len(spans), strict=True):
        begin, end = spans[parent] if parent >= 0 else (0, 0)
        size = _rounded(end - begin), _rounded(stop - start)
        by_length.setdefault(size, []).append(((start, stop), (begin, end)))
    groups: list[_Group] = []
    for (before, length), found in sorted(by_length.items()):
        most = max(1, _SCORES // (heads * min(length, 256) * (before + length)))
        for first in range(0, len(found), most):
            own = tuple(span for span, _ in found[first : first + most])
            befores = tuple(span for _, span in found[first : first + most]) if before else ()
            groups.append(_Group(length, own, before, befores))
    return tuple(groups)


def _rounded(length: int) -> int:
    return -(-length // _GRAIN) * _GRAIN


@lru_cache(maxsize=32)
def _later(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size, size]: -inf where the key is later than the query, else 0; added, which is faster than a bool mask."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu(1)


@torch.compiler.disable
def blocked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Documents, scaling: float
) -> torch.Tensor:
    """Softmax attention, causal within each document and what it goes on from.

    Args:
        query: [1, heads, T, dim].
        key: [1, kv_heads, T, dim].
        value: [1, kv_heads, T, value_dim].
        packed: the documents of the row.
        scaling: factor of the scores.

    Returns:
        [1, T, heads, value_dim], contiguous.
    """
    return cast(torch.Tensor, _Blocked.apply(query, key, value, packed.bounds, packed.parents, scaling))


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, first: int, stop: int, before: int, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Softmax of a block of queries over the keys up to its end.

    Args:
        query: [documents, kv_heads, groups, length, dim], scaled.
        key: [documents * kv_heads, before + length, dim].
        first: first query of the block.
        stop: one past the last.
        before: keys before those of the first query.
        hidden: as of `_Group.hidden`.

    Returns:
        [documents * kv_heads, groups * (stop - first), before + stop].
    """
    groups, size, keys = query.shape[2], stop - first, before + stop
    scores = torch.bmm(_rows(query, first, stop), key[:, :keys].transpose(1, 2))
    diagonal = scores.view(-1, groups, size, keys)[..., before + first :]
    diagonal.add_(_later(size, scores.dtype))
    if hidden is not None:
        scores[..., : hidden.shape[-1]] += hidden
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
        parents: tuple[int, ...],
        scaling: float,
    ) -> torch.Tensor:
        heads, tokens = query.shape[1:3]
        kv_heads, value_dim = key.shape[1], value.shape[3]
        output = query.new_empty(1, tokens, heads, value_dim)
        by_head = output[0].transpose(0, 1)
        train = any(ctx.needs_input_grad[:3])
        saved: list[torch.Tensor] = []
        kept: list[list[torch.Tensor]] = []
        for group in _groups(bounds, heads, parents):
            q = group.gather(query[0], scaling).unflatten(1, (kv_heads, -1))
            k = group.gather_keys(key[0]).flatten(0, 1)
            v = group.gather_keys(value[0]).flatten(0, 1)
            hidden = group.hidden(q, kv_heads)
            o = q.new_empty(*q.shape[:4], value_dim)
            probabilities = []
            for first, stop in group.blocks(q.dtype):
                weights = _probabilities(q, k, first, stop, group.before, hidden)
                part = torch.bmm(weights, v[:, : group.before + stop])
                o[:, :, :, first:stop] = part.view(*q.shape[:3], stop - first, value_dim)
                if train and group.kept:
                    probabilities.append(weights)
            group.scatter(o.flatten(1, 2), by_head)
            saved += [q, k, v]
            kept.append(probabilities)
        if train:
            ctx.save_for_backward(*saved, *(p for probabilities in kept for p in probabilities))
            ctx.counts = [len(probabilities) for probabilities in kept]
            ctx.bounds, ctx.parents, ctx.scaling = bounds, parents, scaling
            ctx.shapes = query.shape, key.shape, value.shape
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_head = grad_outputs[0][0].transpose(0, 1)
        like = grad_outputs[0]
        d_query, d_key, d_value = (like.new_empty(shape) for shape in ctx.shapes)
        if ctx.parents:  # several documents add to what they go on from, in more digits than bf16 has
            wide = torch.promote_types(like.dtype, torch.float32)
            d_key, d_value = (like.new_zeros(shape, dtype=wide) for shape in ctx.shapes[1:])
        kv_heads = d_key.shape[1]
        groups = _groups(ctx.bounds, d_query.shape[1], ctx.parents)
        saved = ctx.saved_tensors
        kept = iter(saved[3 * len(groups) :])
        for number, (group, count) in enumerate(zip(groups, ctx.counts, strict=True)):
            q, k, v = saved[3 * number : 3 * number + 3]
            hidden = group.hidden(q, kv_heads)
            d_o = group.gather(by_head).unflatten(1, (kv_heads, -1))
            d_q = torch.empty_like(q)
            d_k, d_v = _Sum(k), _Sum(v)
            for first, stop in group.blocks(q.dtype):
                weights = next(kept) if count else _probabilities(q, k, first, stop, group.before, hidden)
                keys = group.before + stop
                d_out = _rows(d_o, first, stop)
                d_v.add(torch.bmm(weights.transpose(1, 2), d_out))
                d_weights = torch.bmm(d_out, v[:, :keys].transpose(1, 2))
                d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
                part = torch.bmm(d_scores, k[:, :keys])
                d_q[:, :, :, first:stop] = part.view(*q.shape[:3], stop - first, q.shape[4])
                d_k.add(torch.bmm(d_scores.transpose(1, 2), _rows(q, first, stop)))
            group.scatter(d_q.flatten(1, 2), d_query[0], ctx.scaling)
            for total, whole in ((d_k, d_key), (d_v, d_value)):
                found = total.total().view(len(group.spans), kv_heads, group.keys, -1)
                if ctx.parents:
                    group.add_keys(found, whole[0])
                else:
                    group.scatter(found, whole[0])
        return d_query, d_key.to(like.dtype), d_value.to(like.dtype), None, None, None


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
