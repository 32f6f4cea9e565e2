"""The loader: an iterator of global batches, each with the loader's place after it. Resuming is handing the place back.

Which rows a step has follows from the rows, the seed and the batch size alone: never from packing, and never from the
number of ranks. A global batch is the next `rows_per_step` rows of the epoch's order, or the next rows while they fit
into `tokens_per_step`, at least one. It never reaches over the end of an epoch, so the last one of an epoch may
be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luthier.batch import NO_TOKEN, Batch, Sample
from luthier.config.sections import DataConfig, TrainConfig
from luthier.data.packing import best_fit, deal, microbatches
from luthier.data.pictures import show
from luthier.data.rows import Rows, build_rows
from luthier.data.state import LoaderState, StepBatch
from luthier.data.stream import Placed, StreamRows
from luthier.errors import CheckpointError, ConfigError
from luthier.hf.vision.sight import Sight

ROWS_PER_STEP = 16
"""Rows of a global batch where the config says neither rows nor tokens."""

__all__ = ["Loader", "LoaderState", "Rows", "StepBatch", "StreamRows", "build_rows", "iterate_once"]


@dataclass(frozen=True, slots=True)
class _Step:
    """The rows of a global batch and the place after them."""

    lengths: Sequence[int]
    trained: int
    weight: float
    sample: Callable[[int], Sample]
    epoch: int
    position: int
    piece: int
    passed: float


class Loader:
    """Global batches of a run, or of one rank's part of it.

    Args:
        rows: what `build_rows` gave.
        data: packing, shuffling and the sequence length.
        train: rows or tokens per step, epochs or steps.
        seed: decides the order.
        rank: which part of each global batch this is.
        world_size: how many parts there are.

    Attributes:
        rehearsed: a run that is only tried ends before this step; what is `ahead` ends there too.
    """

    def __init__(
        self,
        rows: Rows | StreamRows,
        data: DataConfig,
        train: TrainConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        if isinstance(rows, StreamRows) and train.steps is None:
            raise ConfigError("streaming needs a number of steps", where="train.steps")
        self._rows = rows
        self._data = data
        self._seed = seed
        self._rank, self._ranks = rank, world_size
        self._steps = train.steps
        self._epochs = train.epochs if train.epochs is not None else 1.0
        self._tokens = train.tokens_per_step
        self._count = None if self._tokens is not None else train.rows_per_step or ROWS_PER_STEP
        settings: dict[str, Any] = {
            "seed": seed,
            "shuffle": data.shuffle,
            "rows_per_step": self._count,
            "tokens_per_step": self._tokens,
            "streaming": isinstance(rows, StreamRows),
        }
        self._state = LoaderState(fingerprint=rows.fingerprint, settings=settings)
        self.rehearsed: int | None = None
        self._before: LoaderState | None = None  # the place of the newest batch

    @property
    def state(self) -> LoaderState:
        """The place of the next batch."""
        return self._state

    def restore(self, state: LoaderState) -> None:
        """Go on from a place.

        Raises:
            CheckpointError: the rows or the batch size are others than those the place was taken in; names what.
        """
        changed = [
            f"{name} was {state.settings.get(name)}, is {value}"
            for name, value in self._state.settings.items()
            if state.settings.get(name) != value
        ]
        if state.fingerprint != self._state.fingerprint:
            changed.append("the training rows are others (their text, source, tokenizer or sequence length)")
        if changed:
            raise CheckpointError(
                f"the place in the data does not hold any more: {'; '.join(changed)}",
                where="data",
                remedy="put it back as it was, or start a new run in another output directory",
            )
        self._state = state

    def steps_total(self) -> int:
        """Optimizer steps of the whole run, the last and smaller batch of each epoch included.

        Those before the present place are counted as they were taken: a run that ended in the middle of an epoch, and
        now goes on for more epochs, has had a smaller batch there.
        """
        if self._steps is not None:
            return self._steps
        epoch, position, steps = self._state.epoch, self._state.position, self._state.step
        while (limit := self._limit(epoch)) > 0:
            steps += self._steps_of(epoch, position, limit)
            epoch, position = epoch + 1, 0
        return steps

    def ahead(self) -> np.ndarray:
        """int64, numbers of the rows of the newest batch, and of those that the run comes to after it, each once."""
        assert isinstance(self._rows, Rows)
        place = self._before or self._state
        epoch, position, step = place.epoch, place.position, place.step
        seen = np.zeros(len(self._rows), bool)
        last = min((steps for steps in (self._steps, self.rehearsed) if steps is not None), default=None)
        while (limit := self._limit(epoch)) > 0 and (last is None or step < last) and not seen.all():
            order = self._rows.order(self._seed, epoch, self._data.shuffle)
            ends = np.cumsum(self._rows.lengths[order]) if self._tokens is not None else None
            begin = position
            while position < limit and (last is None or step < last):
                position, step = self._end(position, limit, ends), step + 1
            seen[order[begin:position]] = True
            epoch, position = epoch + 1, 0
        return np.flatnonzero(seen)

    @property
    def past_end(self) -> bool:
        """Whether the present place lies after the end of the run: it was longer when the place was taken."""
        if self._steps is not None:
            return self._state.step > self._steps
        return self._state.epoch + (self._state.position > 0) > math.ceil(self._epochs)

    def __iter__(self) -> Iterator[StepBatch]:
        """The batches from the present place to the end of the run; the place moves along."""
        steps = self._stream_steps() if isinstance(self._rows, StreamRows) else self._row_steps(self._rows)
        while self._steps is None or self._state.step < self._steps:
            step = next(steps, None)
            if step is None:
                return
            yield self._batch(step)

    def _batch(self, step: _Step) -> StepBatch:
        tokens = int(sum(step.lengths))
        before = self._before = self._state
        self._state = replace(
            before,
            step=before.step + 1,
            epoch=step.epoch,
            position=step.position,
            piece=step.piece,
            rows=before.rows + len(step.lengths),
            tokens=before.tokens + tokens,
            trained_tokens=before.trained_tokens + step.trained,
        )
        # a row of several documents may be longer than any one of them may be
        capacity = max(self._data.sequence_length, *step.lengths)
        dealt = microbatches(step.lengths, capacity, self._data.packing, self._ranks)
        own = [pack([step.sample(row) for row in rows], self._rows.sight) for rows in dealt[self._rank]]
        return StepBatch(own, self._state, len(step.lengths), tokens, step.trained, step.weight, step.passed)

    def _epoch_limits(self) -> tuple[int, int]:
        """Whole epochs, and rows of the one that is not whole."""
        assert isinstance(self._rows, Rows)
        whole = int(self._epochs + 1e-9)
        return whole, math.ceil((self._epochs - whole) * self._rows.epoch_rows - 1e-6)

    def _limit(self, epoch: int) -> int:
        """Rows of an epoch that are trained on."""
        assert isinstance(self._rows, Rows)
        whole, part = self._epoch_limits()
        if self._steps is not None or epoch < whole:
            return self._rows.epoch_rows
        return max(0, part) if epoch == whole else 0

    def _row_steps(self, rows: Rows) -> Iterator[_Step]:
        epoch, position = self._state.epoch, self._state.position
        while (limit := self._limit(epoch)) > 0:
            order = rows.order(self._seed, epoch, self._data.shuffle)
            ends = np.cumsum(rows.lengths[order]) if self._tokens is not None else None
            while position < limit:
                end = self._end(position, limit, ends)
                chosen = order[position:end]
                done = end == rows.epoch_rows  # not at a limit: a run of more epochs goes on from there
                yield _Step(
                    lengths=[int(length) for length in rows.lengths[chosen]],
                    trained=int(rows.trained[chosen].sum()),
                    weight=float(rows.weight_sums[chosen].sum()),
                    sample=lambda row, chosen=chosen: rows[int(chosen[row])],  # type: ignore[misc]
                    epoch=epoch + 1 if done else epoch,
                    position=0 if done else end,
                    piece=0,
                    passed=epoch + end / rows.epoch_rows,
                )
                position = end
            epoch, position = epoch + 1, 0

    def _end(self, position: int, limit: int, ends: np.ndarray | None) -> int:
        """Where the global batch that begins at `position` ends."""
        if ends is None:
            assert self._count is not None
            return min(limit, position + self._count)
        assert self._tokens is not None
        before = int(ends[position - 1]) if position else 0
        return min(limit, max(position + 1, int(np.searchsorted(ends, before + self._tokens, side="right"))))

    def _steps_of(self, epoch: int, position: int, limit: int) -> int:
        """Steps of an epoch from a place on."""
        assert isinstance(self._rows, Rows)
        if self._count is not None:
            return max(0, -(-(limit - position) // self._count))
        ends = np.cumsum(self._rows.lengths[self._rows.order(self._seed, epoch, self._data.shuffle)])
        steps = 0
        while position < limit:
            position = self._end(position, limit, ends)
            steps += 1
        return steps

    def _stream_steps(self) -> Iterator[_Step]:
        assert isinstance(self._rows, StreamRows)
        held: list[Placed] = []
        for placed in self._rows.samples(self._state.position, self._state.piece):
            tokens = sum(len(item.sample) for item in held)
            full = len(held) == self._count or (
                self._tokens is not None and bool(held) and tokens + len(placed.sample) > self._tokens
            )
            if full or (held and placed.passes > held[0].passes and not self._rows.mixed):
                yield _streamed(held)
                held = []
            held.append(placed)


def _streamed(held: list[Placed]) -> _Step:
    samples = [item.sample for item in held]
    last = held[-1]
    return _Step(
        lengths=[len(sample) for sample in samples],
        trained=sum(int(np.count_nonzero(sample.weights)) for sample in samples),
        weight=sum(float(sample.weights.sum(dtype=np.float64)) for sample in samples),
        sample=samples.__getitem__,
        epoch=last.passes,
        position=last.row,
        piece=last.piece,
        passed=float(last.passes),
    )


def pack(samples: Sequence[Sample], sight: Sight | None = None) -> Batch:
    """A microbatch, with what the model sees; without samples one of a single position of weight 0, for a rank that has
    to take part in it."""
    if samples:
        return show(samples, Batch.pack(samples), sight)
    return Batch.pack([Sample(np.zeros(1, np.int64), np.full(1, NO_TOKEN), np.zeros(1, np.float32))])


def iterate_once(
    rows: Rows, tokens_per_batch: int, *, rank: int = 0, world_size: int = 1, packing: bool = True
) -> Iterator[Batch]:
    """Every row once, in the order of the sources; for measuring. No sum over the rows depends on the batch size.

    Args:
        rows: the rows.
        tokens_per_batch: most tokens of a batch; a longer row is a batch of its own.
        rank: which part of the rows this is.
        world_size: how many parts there are; each has equally many batches, some of them of weight 0.
        packing: off: every row is a batch.
    """
    most = 16 * world_size * tokens_per_batch
    start, total = 0, len(rows)
    ends = np.cumsum(rows.lengths)
    while start < total:
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        lengths = [int(length) for length in rows.lengths[start:end]]
        longer = [row for row, length in enumerate(lengths) if length > tokens_per_batch or not packing]
        shorter = [row for row, length in enumerate(lengths) if length <= tokens_per_batch and packing]
        packed = best_fit([lengths[row] for row in shorter], tokens_per_batch)
        bins = [[row] for row in longer] + [[shorter[index] for index in indices] for indices in packed]
        for own in deal(bins, lengths, world_size)[rank]:
            yield pack([rows[start + row] for row in own], rows.sight)
        start = end
