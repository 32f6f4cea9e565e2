"""All rows of a run, ready tokenised: by number, with their lengths, and with the order of every epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, overload

import numpy as np

from luthier.batch import Sample
from luthier.config.sections import DataConfig, SourceConfig
from luthier.data import mixture
from luthier.data.cache import tokenise
from luthier.data.prepare import Progress
from luthier.data.report import DataReport
from luthier.data.stream import StreamRows
from luthier.data.tokenised import Tokenised
from luthier.errors import ConfigError, DataError
from luthier.hf.render import Tokenizer
from luthier.hf.vision.sight import Sight, sight_of


class Rows:
    """Samples of several sources under one numbering.

    Args:
        parts: the sources.
        weights: their shares of a mixture, or None for all rows of all sources.
        chosen: which samples of each part belong here; all when left out.
        sight: what reads their pictures, if the model does.

    Attributes:
        lengths: int64 [rows], positions of each.
        trained: int64 [rows], trained positions of each.
        weight_sums: float64 [rows], sum of the weights of each.
        longest_document: positions of the longest document, of those not chosen as well; a row may hold several.
        epoch_rows: how many rows an epoch has.
        fingerprint: hash of all that is trained on, and of the mixture.
        report: what became of the rows of the sources.
        stop_ids: tokens that ended what the model is to say; generation stops on them.
    """

    def __init__(
        self,
        parts: Sequence[Tokenised],
        weights: Sequence[float] | None = None,
        chosen: Sequence[np.ndarray] | None = None,
        sight: Sight | None = None,
    ) -> None:
        self._parts = list(parts)
        self.sight = sight
        self._weights = None if weights is None else list(weights)
        self._chosen = list(chosen) if chosen is not None else [np.arange(len(part)) for part in parts]
        self._sizes = [len(rows) for rows in self._chosen]
        self._ends = np.cumsum(self._sizes)
        self.lengths = self._column("lengths")
        self.trained = self._column("trained")
        self.weight_sums = self._column("weight_sums")
        self.longest_document = max((int(part.columns["parts"].max(initial=0)) for part in self._parts), default=0)
        self.epoch_rows = sum(mixture.epoch_sizes(self._sizes, self._weights))
        self.report = DataReport()
        for part in self._parts:
            self.report.add(part.report)
        self.stop_ids = list(dict.fromkeys(token for part in self._parts for token in part.stop_ids))
        picked = [hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() for rows in self._chosen]
        content = [[part.content for part in self._parts], picked, self._weights]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[part - 1]) if part else 0
        return replace(self._parts[part][int(self._chosen[part][index - before])], number=index)

    @property
    def pictures(self) -> bool:
        """Whether any row has some."""
        return any(int(part.picture_starts[-1]) for part in self._parts)

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """int64 [epoch_rows], the rows of an epoch in the order they are trained on."""
        return mixture.epoch_order(self._sizes, self._weights, seed, epoch, shuffle)

    def first(self, count: int) -> Rows:
        """The first rows alone."""
        left = count
        chosen = []
        for rows in self._chosen:
            chosen.append(rows[: max(0, left)])
            left -= len(rows)
        return Rows(self._parts, self._weights, chosen, self.sight)

    def some(self, numbers: np.ndarray) -> Rows:
        """Those of these numbers alone, which rise; they are numbered anew."""
        chosen = []
        for rows, end in zip(self._chosen, self._ends, strict=True):
            inside = numbers[(numbers >= end - len(rows)) & (numbers < end)]
            chosen.append(rows[inside - (end - len(rows))])
        return Rows(self._parts, None, chosen, self.sight)

    def held_out(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """These rows in two parts without overlap: the ones to train on, and about `fraction` of them held out.

        Which rows are held out follows from what is in them and the seed, not from where they stand. Rows that are
        alike, and the pieces of one row, stay on one side.

        Raises:
            DataError: there are too few different rows.
        """
        groups: dict[bytes, list[tuple[int, int]]] = {}
        documents = 0
        for number, part in enumerate(self._parts):
            for start, end in _documents(part):
                mark = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little"))
                for name in ("tokens", "targets", "weights"):
                    mark.update(part.columns[name][part.starts[start] : part.starts[end]].tobytes())
                groups.setdefault(mark.digest(), []).extend((number, index) for index in range(start, end))
                documents += 1
        wanted = max(1, round(fraction * documents))
        taken: set[tuple[int, int]] = set()
        seen = 0
        for mark_bytes in sorted(groups):
            if seen >= wanted:
                break
            members = groups[mark_bytes]
            taken.update(members)
            seen += len({(number, int(self._parts[number].columns["document"][index])) for number, index in members})
        if len(taken) == len(self):
            raise DataError(
                f"there are too few different rows ({len(groups)}) to hold some of them out",
                where="data.validation_fraction",
                remedy="name validation rows, or leave it out",
            )
        inside = [np.array([i for i in rows if (n, int(i)) in taken], np.int64) for n, rows in enumerate(self._chosen)]
        outside = [np.setdiff1d(rows, held) for rows, held in zip(self._chosen, inside, strict=True)]
        held = Rows(self._parts, None, inside, self.sight)
        return Rows(self._parts, self._weights, outside, self.sight), held

    def _column(self, name: str) -> np.ndarray:
        return np.concatenate([part.columns[name][rows] for part, rows in zip(self._parts, self._chosen, strict=True)])


@overload
def build_rows(
    config: DataConfig,
    which: Literal["validation"],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Rows: ...


@overload
def build_rows(
    config: DataConfig,
    which: Literal["train", "validation"],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Rows | StreamRows: ...


def build_rows(
    config: DataConfig,
    which: Literal["train", "validation"],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Rows | StreamRows:
    """The rows to train on, or those to measure on.

    Args:
        config: the section `data`.
        which: "train" or "validation".
        tokenizer: with the chat template in it.
        seed: decides which rows `validation_fraction` holds out.
        progress: told how many rows of a source are done.

    Returns:
        StreamRows for training rows with `data.streaming`, else Rows.

    Raises:
        ConfigError: the config names no such rows.
        DataError: a source or a row cannot be used, or no row is left.
    """
    if which == "validation" and config.validation is None:
        if config.validation_fraction is None:
            raise ConfigError("there are no validation rows", where="data.validation", remedy="name a file there")
        return _read(config, config.train, tokenizer, progress).held_out(config.validation_fraction, seed)[1]
    sources = config.train if which == "train" else config.validation
    if sources is None:
        remedy = "name a file, a directory or hf://owner/name"
        raise ConfigError("there are no rows to train on", where="data.train", remedy=remedy)
    if which == "train" and config.streaming:
        return StreamRows(sources, config, tokenizer, mixture_weights(sources), seed)
    rows = _read(config, sources, tokenizer, progress)
    if which == "train" and config.validation_fraction is not None:
        return rows.held_out(config.validation_fraction, seed)[0]
    return rows


def mixture_weights(sources: Sequence[SourceConfig]) -> list[float] | None:
    """The weights of the sources if any source names one (1 where it does not), else None."""
    if len(sources) == 1 or all(source.weight is None for source in sources):
        return None
    return [1.0 if source.weight is None else source.weight for source in sources]


def _read(
    config: DataConfig, sources: Sequence[SourceConfig] | None, tokenizer: Tokenizer, progress: Progress | None
) -> Rows:
    if sources is None:
        raise ConfigError("there are no rows to hold any out of", where="data.train")
    parts = []
    for source in sources:
        part = tokenise(source, config, tokenizer, progress)
        if not len(part):
            told = "; ".join(part.report.lines())
            raise DataError(f"no rows are left to be used ({told})", where=source.path)
        parts.append(part)
    return Rows(parts, mixture_weights(sources), sight=sight_of(tokenizer))


def _documents(part: Tokenised) -> list[tuple[int, int]]:
    """(first sample, sample after the last) of each row that samples came from."""
    document = part.columns["document"]
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    ends = np.append(starts[1:], len(document))
    return [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
