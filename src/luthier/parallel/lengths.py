"""Microbatches made equally long: a pipeline hands on hidden states of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from luthier.batch import NO_TOKEN, Batch


def to_one_length(batches: Sequence[Batch]) -> list[Batch]:
    """The same microbatches, as long as the longest, by positions of weight 0 at their ends.

    Rows of one document each grow by their document, which needs no packing to be right. Otherwise documents are added,
    none longer than the longest there is: a model may have no positions beyond.
    """
    length = max(batch.tokens for batch in batches)
    packed = any(batch.documents > 1 for batch in batches)
    longest = max(int(batch.cu_seqlens.diff().max()) for batch in batches)
    return [_lengthened(batch, length, longest if packed else None) for batch in batches]


def _lengthened(batch: Batch, length: int, longest: int | None) -> Batch:
    missing = length - batch.tokens
    if not missing:
        return batch
    filler = batch.input_ids.new_zeros(1, missing)
    if longest is None:
        positions = torch.arange(batch.tokens, length, device=filler.device)
        bounds = torch.cat([batch.cu_seqlens[:-1], batch.cu_seqlens[-1:] + missing])
    else:
        positions = torch.arange(missing, device=filler.device) % longest
        ends = [*range(batch.tokens + longest, length, longest), length]
        bounds = torch.cat([batch.cu_seqlens, batch.cu_seqlens.new_tensor(ends)])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, filler], 1),
        position_ids=torch.cat([batch.position_ids, positions[None]], 1),
        targets=torch.cat([batch.targets, torch.full_like(filler, NO_TOKEN)], 1),
        weights=torch.cat([batch.weights, batch.weights.new_zeros(1, missing)], 1),
        cu_seqlens=bounds,
        origins=(*batch.origins, *[""] * (len(bounds) - 1 - len(batch.origins))) if batch.origins else (),
    )
