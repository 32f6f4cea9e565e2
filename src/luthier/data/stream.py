"""Rows read and tokenised while training goes on: bounded memory, and the exact place found again on resume.

Rows are shuffled before they are tokenised, in a buffer of `shuffle_buffer` rows. Everything follows from the seed and
the sources, so the place in the stream is one number: how many rows have left the buffer. Going on from it reads those
rows again, which is quick, and tokenises none of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from luthier.batch import Sample
from luthier.config.sections import DataConfig, SourceConfig
from luthier.data.prepare import SourceReader
from luthier.data.report import DataReport
from luthier.data.sources import RawRow, files_of, hub
from luthier.errors import DataError
from luthier.hf.render import Tokenizer
from luthier.hf.tokenizer import fingerprint
from luthier.hf.vision.sight import sight_of

_SHUFFLE, _CHOICE = 3, 4
"""Kinds of random numbers; each has a stream of its own."""


class Placed(NamedTuple):
    """A sample and the place after it.

    Attributes:
        sample: the sample.
        row: number of its row in the shuffled stream.
        piece: samples of that row that have been given out, this one among them.
        passes: how often its source had been read to the end before.
    """

    sample: Sample
    row: int
    piece: int
    passes: int


class _Read(NamedTuple):
    source: int
    passes: int
    raw: RawRow


class StreamRows:
    """Samples of one or several sources, without end.

    Without weights the sources are read one after the other, and an epoch is one pass through all of them: its last
    rows leave the buffer before the next begins. With weights every row comes from a source drawn by weight, and a
    source that ends begins again.

    Attributes:
        fingerprint: hash of the sources' names and sizes, how they are read, and the tokenizer.
        report: what has become of the rows so far.
        stop_ids: tokens that ended what the model is to say so far.
        mixed: whether rows are drawn by weight, so that there are no epochs.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        data: DataConfig,
        tokenizer: Tokenizer,
        weights: Sequence[float] | None,
        seed: int,
    ) -> None:
        self._readers = [SourceReader(source, data, tokenizer) for source in sources]
        self.sight = sight_of(tokenizer)
        self.pictures = self.sight is not None  # perhaps
        self._data = data
        self._weights = weights
        self.mixed = weights is not None
        self._seed = seed
        described = []
        for reader in self._readers:
            source = reader.source
            if source.path.startswith(hub.PREFIX):
                reader.loaded = hub.load(source, streaming=True)
                files: list[list[Any]] = []
            elif source.format == "random":
                files = []
            else:
                reader.files = files_of(source)
                files = [[file.name, os.path.getsize(file)] for file in reader.files]
            described.append([source.model_dump(mode="json"), files])
            # a source that cannot be used is found now, and so are the tokens that end turns
            next(reader.rows())
        settings = [data.sequence_length, data.too_long, data.on_bad_row, data.shuffle_buffer, weights]
        content = json.dumps([described, settings, fingerprint(tokenizer)], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    @property
    def report(self) -> DataReport:
        total = DataReport()
        for reader in self._readers:
            total.add(reader.report)
        return total

    @property
    def stop_ids(self) -> list[int]:
        return sorted(set().union(*(reader.stop_ids for reader in self._readers)))

    def samples(self, row: int = 0, piece: int = 0) -> Iterator[Placed]:
        """Samples from a place on.

        Args:
            row: rows of the shuffled stream to skip.
            piece: samples to skip of the first row that is not skipped.

        Raises:
            DataError: a source or a row cannot be used, or a source has gone by twice without a sample.
        """
        fertile: dict[int, int] = {}
        for number, read in enumerate(self._shuffled()):
            if number < row:
                continue
            reader = self._readers[read.source]
            made = reader.samples(read.raw)
            last = fertile.setdefault(read.source, read.passes)
            if made:
                fertile[read.source] = read.passes
            elif read.passes > last + 1:
                told = "; ".join(reader.report.lines())
                raise DataError(f"no rows are left to be used ({told})", where=reader.source.path)
            for count, sample in enumerate(made, start=1):
                if number > row or count > piece:
                    yield Placed(sample, number, count, read.passes)

    def _shuffled(self) -> Iterator[_Read]:
        if not self._data.shuffle:
            yield from self._mixed()
            return
        draw = np.random.default_rng([_SHUFFLE, self._seed])
        held: list[_Read] = []
        passes = 0
        for read in self._mixed():
            if self._weights is None and read.passes != passes:
                passes = read.passes
                yield from (held[index] for index in draw.permutation(len(held)))
                held = []
            if len(held) < self._data.shuffle_buffer:
                held.append(read)
                continue
            place = int(draw.integers(len(held)))
            yield held[place]
            held[place] = read

    def _mixed(self) -> Iterator[_Read]:
        if self._weights is None:
            passes = 0
            while True:
                for number, reader in enumerate(self._readers):
                    yield from (_Read(number, passes, raw) for raw in reader.rows())
                passes += 1
        shares = np.asarray(self._weights, dtype=np.float64)
        shares /= shares.sum()
        draw = np.random.default_rng([_CHOICE, self._seed])
        each = [self._endless(number) for number in range(len(self._readers))]
        while True:
            # many draws at once are much quicker than single ones
            for number in draw.choice(len(shares), size=1024, p=shares):
                yield next(each[int(number)])

    def _endless(self, number: int) -> Iterator[_Read]:
        passes = 0
        while True:
            yield from (_Read(number, passes, raw) for raw in self._readers[number].rows())
            passes += 1
