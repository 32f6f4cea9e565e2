"""What stands before every document, or beside its attention, without being part of its text.

Three ways, each of which `luthier.adapters` puts in place and this room's forward takes heed of:

- virtual tokens: ids beyond the vocabulary before each document, for which the table of tokens has embeddings of its
  own; the row grows by them, and their hidden states are dropped;
- a prefix: keys and values before those of each document in every layer; positions of the text begin behind it;
- something that attention adds to its result for each query (LLaMA-Adapter).

Documents of a packed row each have them, and none sees another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from luthier.batch import NO_TOKEN, Batch

_ATTRIBUTE = "luthier_virtual"
PREFIX = "attention_prefix"
"""Child of an attention module that, called, gives keys and values [1, heads, positions, dim]."""
BESIDE = "adaption"
"""Child of an attention module that, called with it and its queries [batch, heads, q, dim], gives what is added to the
result [batch, q, heads, dim]."""


@dataclass
class Virtual:
    """What a model has before its documents.

    Attributes:
        tokens: virtual tokens before each.
        first: id of the first of them, the others follow.
        positions: keys before each in every layer, behind which the positions of its text begin.
        prepare: called before every forward pass.
        on: off while the model itself is looked at.
    """

    tokens: int = 0
    first: int = 0
    positions: int = 0
    prepare: Callable[[Any], None] | None = None
    on: bool = True

    @property
    def length(self) -> int:
        """How many positions of the model's are not there for text."""
        return self.tokens + self.positions


def virtual_of(model: nn.Module) -> Virtual | None:
    """What a model has before its documents, if anything and if it is on."""
    found = cast("Virtual | None", vars(model).get(_ATTRIBUTE))
    return found if found is not None and found.on else None


def has_virtual(model: nn.Module) -> bool:
    """Whether a model has something before its documents, on or not."""
    return _ATTRIBUTE in vars(model)


def set_virtual(model: nn.Module, virtual: Virtual | None) -> None:
    """Let a model have something before its documents, or nothing any more."""
    vars(model).pop(_ATTRIBUTE, None)
    if virtual is not None:
        vars(model)[_ATTRIBUTE] = virtual


@contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Within, the model is without what stands before its documents."""
    found = virtual_of(model)
    if found is None:
        yield
        return
    found.on = False
    try:
        yield
    finally:
        found.on = True


def lengthened(batch: Batch, virtual: Virtual) -> tuple[Batch, Tensor | None]:
    """A row as the model runs it.

    Args:
        batch: T positions.
        virtual: what stands before its documents.

    Returns:
        the row with virtual tokens before each document, positions moved behind what is before them; and int64 [T],
        where the given positions are in it, None where they are all there is.
    """
    if not virtual.tokens:
        return replace(batch, position_ids=batch.position_ids + virtual.positions), None
    count = virtual.tokens
    device = batch.input_ids.device
    starts = batch.cu_seqlens.to(device).long()
    lengths = starts[1:] - starts[:-1]
    documents = len(lengths)
    index = torch.repeat_interleave(torch.arange(documents, device=device), lengths, output_size=batch.tokens)
    kept = torch.arange(batch.tokens, device=device) + count * (index + 1)  # [T]
    added = torch.arange(count, device=device)
    places = (starts[:-1, None] + count * torch.arange(documents, device=device)[:, None] + added).flatten()
    total = batch.tokens + count * documents

    def laid(values: Tensor, filling: Tensor | int) -> Tensor:
        row = values.new_zeros(1, total, *values.shape[2:])
        row[:, kept] = values
        row[:, places] = filling
        return row

    row = replace(
        batch,
        input_ids=laid(batch.input_ids, (virtual.first + added).repeat(documents)),
        position_ids=laid(batch.position_ids + count, added.repeat(documents)),
        targets=laid(batch.targets, NO_TOKEN),
        weights=laid(batch.weights, 0),
        cu_seqlens=batch.cu_seqlens + count * torch.arange(documents + 1, device=batch.cu_seqlens.device).int(),
        inputs={},
    )
    return row, kept


def with_prefix(prefix: nn.Module, key: Tensor, value: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Keys and values of a packed row, those of the prefix before each document's.

    Args:
        prefix: of the attention module.
        key: [1, heads, T, dim].
        value: the same.
        spans: first position of each document, and one past the last.

    Returns:
        [1, heads, T + documents x positions, dim] each.
    """
    before, worth = prefix()
    keys = [part for start, stop in spans for part in (before.to(key.dtype), key[:, :, start:stop])]
    values = [part for start, stop in spans for part in (worth.to(value.dtype), value[:, :, start:stop])]
    return torch.cat(keys, 2), torch.cat(values, 2)
