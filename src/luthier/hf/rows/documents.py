"""Which documents lie in the packed row that a model is running on, and how every attention layer learns of it.

`documents(cu_seqlens)` is entered around one forward pass. Inside it, the mask function of the attention "luthier"
does not build a [T, T] mask but returns a *channel*: a tiny int32 tensor [1, 1, 1, documents + 1], `cu_seqlens`.
Transformers hands a mask to every layer as an argument, whatever the architecture, so activation checkpointing keeps
it for the recomputation in the backward pass, where a global or a context variable would be gone without a word.

Documents may share a beginning (the prompt of two answers): it then lies in the row once, and each of them goes on from
it. The channel has a second row of numbers in that case, which beginning each document follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

_ATTRIBUTE = "luthier_documents"
"""Name under which a mask tensor carries its `Documents`."""


class Exchange(Protocol):
    """How ranks that each hold a part of a row trade positions for heads (`parallel/context.py`).

    Attributes:
        degree: number of ranks.
        rank: which of them this is.
    """

    degree: int
    rank: int

    def positions(self, tokens: int) -> torch.Tensor:
        """int64 [T / degree], on the CPU: which positions of a row of T this rank holds, in its order."""
        ...

    def to_heads(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        """Some heads of all positions for all heads of this rank's positions; all ranks, differentiable.

        Args:
            tensors: [1, heads, T / degree, dim] each.
            wanted: for each tensor, for each rank, the heads that it asks for; several may ask for one.

        Returns:
            [1, heads asked for here, T, dim] each, positions in the row's order.
        """
        ...

    def to_positions(self, output: torch.Tensor) -> torch.Tensor:
        """The way back: [1, T, heads / degree, dim] to [1, T / degree, heads, dim]; all ranks, differentiable."""
        ...


@dataclass(frozen=True, slots=True)
class Documents:
    """Where each document of a packed row begins.

    Attributes:
        cu_seqlens: int32 [documents + 1], first position of each document, then T.
        bounds: the same numbers on the host.
        parents: for each document the one that it goes on from, which goes on from none itself, or -1; empty where none
            goes on from another.
        exchange: where several ranks hold the row, each a part of it; None where every rank has it whole.
    """

    cu_seqlens: torch.Tensor
    bounds: tuple[int, ...]
    parents: tuple[int, ...] = ()
    exchange: Exchange | None = field(default=None, compare=False)

    @staticmethod
    def of(cu_seqlens: torch.Tensor | Sequence[int], parents: Sequence[int] = ()) -> Documents:
        """Read the bounds once, so that no layer has to synchronise with the device.

        Args:
            cu_seqlens: first position of each document, then T.
            parents: as of the attribute.

        Raises:
            ValueError: the bounds do not rise from 0, or a parent does not come before its document.
        """
        tensor = torch.as_tensor(cu_seqlens, dtype=torch.int32).flatten()
        bounds = tuple(tensor.tolist())
        if len(bounds) < 2 or bounds[0] != 0 or any(b <= a for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to the row's length, not {bounds}")
        if any(parent >= 0 for parent in parents):
            roots = len(parents) == len(bounds) - 1 and all(p < n for n, p in enumerate(parents))
            if not roots or any(parents[parent] >= 0 for parent in parents if parent >= 0):
                raise ValueError(f"a document goes on from an earlier one that goes on from none, not {parents}")
            return Documents(tensor, bounds, tuple(parents))
        return Documents(tensor, bounds)

    @property
    def tokens(self) -> int:
        """Length T of the row."""
        return self.bounds[-1]

    @property
    def held(self) -> int:
        """Positions of the row that this rank holds."""
        return self.tokens // (self.exchange.degree if self.exchange is not None else 1)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[(first, one past the last)] of each document."""
        return list(pairwise(self.bounds))

    @property
    def beginnings(self) -> list[tuple[int, int]]:
        """[(first, one past the last)] of what each document goes on from; (0, 0) for none."""
        spans = self.spans
        parents = self.parents or (-1,) * len(spans)
        return [spans[parent] if parent >= 0 else (0, 0) for parent in parents]

    @property
    def longest(self) -> int:
        pairs = zip(self.spans, self.beginnings, strict=True)
        return max(stop - start + end - begin for (start, stop), (begin, end) in pairs)

    def meets(self, device: torch.device | str) -> torch.Tensor:
        """bool [T, T]: whether two positions, a query's and a key's, are of one text, in whatever order."""
        index = self.index(device)
        same: torch.Tensor = index[:, None] == index[None, :]
        if not self.parents:
            return same
        before = torch.tensor(self.parents, device=device)[index]
        return same | (before[:, None] == index[None, :])

    def index(self, device: torch.device | str) -> torch.Tensor:
        """int64 [T]: the number of the document that each position belongs to."""
        lengths = torch.tensor([stop - start for start, stop in self.spans])
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)

    def positions(self, device: torch.device | str) -> torch.Tensor:
        """int64 [T]: the place of each position within its document, what this goes on from counted in."""
        pairs = zip(self.spans, self.beginnings, strict=True)
        starts = torch.tensor([start - (end - begin) for (start, _), (begin, end) in pairs])
        return (torch.arange(self.tokens) - starts[self.index("cpu")]).to(device)

    def channel(self, device: torch.device | str) -> torch.Tensor:
        """int32 [1, 1, 1, documents + 1] that stands for "causal within each document" in the place of a mask; with a
        second row, [1, 1, 2, documents + 1], of the parents and a last -1, where there are any."""
        tensor = self.cu_seqlens.to(device).reshape(1, 1, 1, -1)
        if self.parents:
            second = torch.tensor([*self.parents, -1], dtype=torch.int32, device=tensor.device)
            tensor = torch.cat([tensor, second.reshape(1, 1, 1, -1)], 2)
        return self.attach(tensor)

    def attach(self, mask: torch.Tensor) -> torch.Tensor:
        """Let a mask carry these documents; returns a tensor of its own, so that no other mask is changed."""
        own = mask.view_as(mask)
        setattr(own, _ATTRIBUTE, self)
        return own


_ACTIVE: ContextVar[Documents | None] = ContextVar("luthier_documents", default=None)


_TOKENS: ContextVar[int | None] = ContextVar("luthier_tokens", default=None)


@contextmanager
def documents(
    cu_seqlens: torch.Tensor | Sequence[int] | Documents | None, *, told: bool = True
) -> Iterator[Documents | None]:
    """Every "luthier" attention within sees these documents; None = rows are not packed.

    Args:
        cu_seqlens: int32 [documents + 1], where each document begins, and T.
        told: False for a model that is to know of no documents but by their positions.
    """
    inside = cu_seqlens if cu_seqlens is None or isinstance(cu_seqlens, Documents) else Documents.of(cu_seqlens)
    token, length = _ACTIVE.set(inside if told else None), _TOKENS.set(None if inside is None else inside.tokens)
    try:
        yield inside
    finally:
        _ACTIVE.reset(token)
        _TOKENS.reset(length)


def active_documents() -> Documents | None:
    """Documents of the forward pass that is running in this context."""
    return _ACTIVE.get()


def row_tokens() -> int | None:
    """Length T of the row, of all ranks' parts together, that is running in this context; None = not packed."""
    return _TOKENS.get()


def is_channel(mask: torch.Tensor | None) -> bool:
    """Whether this "mask" is the channel and no mask."""
    return mask is not None and mask.dtype == torch.int32


def documents_of(mask: torch.Tensor | None) -> Documents | None:
    """The documents that a mask carries; read from its numbers if it is the channel but lost its attribute."""
    if mask is None:
        return None
    carried: Documents | None = getattr(mask, _ATTRIBUTE, None)
    if carried is None and is_channel(mask):
        return Documents.of(mask[0, 0, 0], mask[0, 0, 1, :-1].tolist() if mask.shape[2] > 1 else ())
    return carried
