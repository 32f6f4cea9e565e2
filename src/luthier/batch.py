"""What flows between the rooms: a `Sample` is one document, a `Batch` is one microbatch of packed documents.

Targets are shifted once, on the whole document, before any packing or cutting: position t of `tokens` predicts
`targets[t]`, and `weights[t]` says how much that prediction counts (0 = not trained on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

NO_TOKEN = -100
"""Target of a position that is no token of any document; its weight is 0."""

ASKED = "asked"
"""In the `meta` of a row whose first token alone is its question: all its targets train, as those of plain text do."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a row, unopened.

    Attributes:
        path: the file that it lies in; of one that stands in the row itself what to call it.
        digest: hash of its bytes, of 32 hex digits: it must be the picture that the row was tokenised with.
        data: its bytes, where no file has them.
    """

    path: str
    digest: str
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: a document or conversation, or several that belong together, T positions long in all.

    Attributes:
        tokens: int64 [T], the model's input.
        targets: int64 [T], what each position predicts.
        weights: float32 [T], the weight of each prediction in the loss; 0 = not trained on.
        origin: where it came from ("train.jsonl:12"), for messages.
        parts: lengths of the documents that lie end to end in it (the two answers of a pair, each with the prompt in
            front); empty where it is one.
        meta: what else the row says, as JSON has it (the label of an answer, columns that a reward function reads).
        number: which row of its `Rows` it is; -1 where rows have no numbers.
        pictures: what the model sees beside the tokens, in the order of their tags.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    origin: str = ""
    parts: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    number: int = -1
    pictures: tuple[Picture, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of its documents."""
        return self.parts or (len(self.tokens),)

    @property
    def documents(self) -> list[Sample]:
        """Each of its documents as a sample."""
        ends = np.cumsum(self.lengths).tolist()
        spans = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        return [Sample(self.tokens[s], self.targets[s], self.weights[s], self.origin) for s in spans]

    @staticmethod
    def join(
        documents: Sequence[Sample], origin: str = "", meta: Mapping[str, Any] | None = None, number: int = -1
    ) -> Sample:
        """One row of several documents that belong together."""
        tokens, targets, weights = (
            np.concatenate([getattr(document, name) for document in documents])
            for name in ("tokens", "targets", "weights")
        )
        return Sample(tokens, targets, weights, origin, tuple(map(len, documents)), meta or {}, number)

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_ids(ids: Sequence[int] | np.ndarray, weights: Sequence[float] | np.ndarray, origin: str = "") -> Sample:
        """Shift a full sequence of n ids into a sample of n - 1 positions.

        Args:
            ids: [n] token ids of the whole document.
            weights: [n] weight of each *token as something to be predicted*; the first is never predicted.
            origin: where the document came from.
        """
        full = np.asarray(ids)
        if full.size and full.dtype.kind not in "iu":  # a cast would cut 1.5 down to 1 without a word
            raise ValueError(f"ids are {full.dtype}, not whole numbers")
        full = full.astype(np.int64, copy=False)
        weight = np.asarray(weights, dtype=np.float32)
        if full.ndim != 1 or full.shape != weight.shape:
            raise ValueError(f"ids {full.shape} and weights {weight.shape} must be one-dimensional and of one length")
        return Sample(full[:-1], full[1:], weight[1:], origin)


@dataclass(frozen=True, slots=True)
class Row:
    """What a batch knows of a row beside its tokens.

    Attributes:
        documents: how many of the batch's documents it is, one after another.
        number: which row of its `Rows`; -1 where rows have no numbers, or where it only fills a microbatch.
        meta: as of `Sample`.
    """

    documents: int = 1
    number: int = -1
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: documents laid end to end in one row of T positions, kept apart by `cu_seqlens`.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T], starting again from 0 at each document.
        targets: int64 [1, T], already shifted; NO_TOKEN at positions that only fill the row up. [1, T, K] where each
            position has several.
        weights: float64, one for each target; the loss is the sum of weight x (-log p(target)). A recipe divides them
            by the weight of its whole global batch, so that microbatches and ranks just add up.
        cu_seqlens: int32 [documents + 1], where each document begins, and T.
        origins: where each document came from.
        inputs: what a loss of one's own reads beside the log-probabilities, by name, [T, ...] or an entry a document.
        rows: the rows that its documents are of, in their order; empty where nobody asks.
        parents: for each document the one that it goes on from, or -1: two answers to a prompt that lies in the row
            once (`engine/prefixes.py`). Empty where none does; positions start again from 0 where a document goes on
            from none.
        sights: gives what the model's forward reads beside the tokens, by the names of its arguments (pixel_values);
            asked when the row is run, since pictures are large. None for text alone.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor
    origins: tuple[str, ...] = field(default=())
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    parents: tuple[int, ...] = ()
    sights: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @staticmethod
    def pack(samples: Sequence[Sample]) -> Batch:
        """Lay samples end to end in the order given."""
        if not samples or any(len(sample) == 0 for sample in samples):
            raise ValueError("a batch needs at least one sample, and no sample of length 0")
        lengths = [length for sample in samples for length in sample.lengths]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Batch(
            input_ids=torch.from_numpy(np.concatenate([s.tokens for s in samples]).astype(np.int64))[None],
            position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]))[None],
            targets=torch.from_numpy(np.concatenate([s.targets for s in samples]).astype(np.int64))[None],
            weights=torch.from_numpy(np.concatenate([s.weights for s in samples]).astype(np.float64))[None],
            cu_seqlens=torch.from_numpy(starts),
            origins=tuple(sample.origin for sample in samples for _ in sample.lengths),
            rows=tuple(Row(len(sample.lengths), sample.number, sample.meta) for sample in samples),
        )

    @property
    def tokens(self) -> int:
        """Number of positions T."""
        return self.input_ids.shape[1]

    @property
    def documents(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def total_weight(self) -> float:
        return float(self.weights.sum())

    @property
    def trained_tokens(self) -> int:
        """Number of positions whose weight is not 0."""
        return int((self.weights != 0).sum())

    def scaled(self, factor: float) -> Batch:
        """The same batch with every weight multiplied by `factor`."""
        return replace(self, weights=self.weights * factor)

    def padded(self, multiple: int) -> Batch:
        """The same batch with one more document of weight 0 at its end, so that T is a multiple of this number; without
        `inputs`, which are for the loss and not for the model. One with pictures stays as long as it is."""
        missing = -self.tokens % multiple
        if not missing or self.sights is not None:
            return self
        filler, each = self.input_ids.new_zeros(1, missing), self.targets.shape[2:]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, filler], 1),
            position_ids=torch.cat([self.position_ids, torch.arange(missing, device=filler.device)[None]], 1),
            targets=torch.cat([self.targets, self.targets.new_full((1, missing, *each), NO_TOKEN)], 1),
            weights=torch.cat([self.weights, self.weights.new_zeros(1, missing, *each)], 1),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + missing]),
            origins=(*self.origins, ""),
            inputs={},
            parents=(*self.parents, -1) if self.parents else (),
        )

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            targets=self.targets.to(device),
            weights=self.weights.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            inputs={name: values.to(device) for name, values in self.inputs.items()},
        )
