"""Checkpoints: tensors in safetensors files, everything else as JSON, committed by one rename.

On several ranks each writes what it holds (`checkpoint_tensors`), and when all have, rank 0 commits; the directory must
be one that all of them see. A step is written into `checkpoints/.writing-step-000050`, flushed to disk, then renamed to
`step-000050`. Only the renamed directory is a checkpoint; whatever a crash leaves behind has the other name and is
removed by the next run that owns the directory (`Checkpointer.tidy`), never by somebody who only reads.

Everything is stored by name, so it can be read on any layout, and no pickle is involved.

Random states are each rank's own. A run that goes on with another layout than the checkpoint was taken on cannot use
them, since other ranks see other rows: it seeds anew from its seed and the step (`random_states` gives None).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luthier.engine import randomness
from luthier.engine.checkpoint_tensors import (
    Block,
    blocks_to_write,
    read,
    stored_tensors,
    tensors_of,
    write,
    write_json,
)
from luthier.engine.state import Counters, TrainState
from luthier.errors import CheckpointError, first_line
from luthier.hf.together import Group, rank_in, tell, together, told_once
from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh, spare_group

_COMMITTED = re.compile(r"step-(\d{6,})")
_WRITING = ".writing-"
_RECORD = "state.json"
_TENSORS = "tensors"
_PATIENCE = timedelta(hours=2)
"""How long ranks wait for the slowest writer."""
_USE_OLDER = "remove this directory to go on from an older one"


def committed(directory: Path) -> list[Path]:
    """The committed checkpoints of a `checkpoints/` directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _COMMITTED.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint: counters, loader place, random states, what it was taken of."""
    try:
        record = json.loads((checkpoint / _RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"is not a checkpoint: it holds no {_RECORD}", where=str(checkpoint), remedy=_USE_OLDER
        ) from None
    except ValueError as error:
        raise _damaged(checkpoint, error) from None
    if not isinstance(record, dict):
        raise _damaged(checkpoint, TypeError("it holds no JSON object"))
    return record


@contextmanager
def reading(checkpoint: Path, file: str = _RECORD) -> Iterator[None]:
    """Around whatever looks into a record: a part that is missing or no such thing means that the record is damaged.

    Args:
        checkpoint: whose.
        file: that the record is in.

    Raises:
        CheckpointError: it is.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        raise _damaged(checkpoint, error, file) from error


def random_states(checkpoint: Path, mesh: Mesh | None) -> dict[str, Any] | None:
    """The states of this rank's random generators; None where the checkpoint was taken on another layout.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    with reading(checkpoint):
        if read_record(checkpoint)["layout"] != _layout(mesh):
            return None
    with reading(checkpoint, _random_file(mesh)):
        return dict(json.loads((checkpoint / _random_file(mesh)).read_text(encoding="utf-8")))


def _layout(mesh: Mesh | None) -> str:
    return str(mesh.layout if mesh is not None else Layout())


def _random_file(mesh: Mesh | None) -> str:
    return f"random-{mesh.rank if mesh is not None else 0:05d}.json"


def _damaged(checkpoint: Path, error: Exception, file: str = _RECORD) -> CheckpointError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return CheckpointError(f"{file} is damaged ({reason})", where=str(checkpoint), remedy=_USE_OLDER)


def _score(checkpoint: Path) -> tuple[float, Any] | None:
    """The validation loss that a checkpoint was taken at, and what it is of; one whose record is damaged is nobody's
    best."""
    try:
        record = read_record(checkpoint)
    except CheckpointError:
        return None
    score = record.get("score")
    return (float(score), record.get("score_of")) if isinstance(score, int | float) else None


def _best(checkpoints: list[Path]) -> Path | None:
    """The checkpoint of the lowest score, oldest first; only of what the newest score is of, others do not compare."""
    scores = {path: score for path in checkpoints if (score := _score(path)) is not None}
    of = next((of for _, of in reversed(scores.values())), None)
    return min((path for path in scores if scores[path][1] == of), key=lambda path: scores[path][0], default=None)


def check_unchanged(taken_of: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuse to go on with other data, another batch, model or loss than the checkpoint was taken of.

    Raises:
        CheckpointError: naming each thing that changed, with both values; of a method that is another, only that.
    """
    keys = {key for key in taken_of.keys() | now.keys() if taken_of.get(key) != now.get(key)}
    if "method" in keys:
        keys = {key for key in keys if not key.startswith("method.")}
    changed = [f"{key} was {taken_of.get(key)!r} and is {now.get(key)!r}" for key in sorted(keys)]
    if changed:
        raise CheckpointError(
            "cannot go on from this checkpoint: " + ", ".join(changed),
            where=str(checkpoint),
            remedy="undo the change, or start anew with another output or --resume never",
        )


class Checkpointer:
    """Writes, keeps and prunes the checkpoints of one run.

    Args:
        directory: the run's `checkpoints/`.
        keep: how many of the newest stay.
        keep_best: keep the one with the lowest score as well.
        trainable_only: leave frozen parameters out.
        asynchronous: copy the tensors, then write them while training goes on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        keep_best: bool = True,
        trainable_only: bool = False,
        asynchronous: bool = True,
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._keep_best = keep_best
        self._trainable_only = trainable_only
        self._asynchronous = asynchronous
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._group: Group | None = None

    def tidy(self) -> None:
        """Remove what a crash left half written; only for the one run that has locked the directory and writes here."""
        for leftover in self.directory.glob(f"{_WRITING}*"):
            shutil.rmtree(leftover)

    def latest(self) -> Path | None:
        """The newest committed checkpoint."""
        found = committed(self.directory)
        return found[-1] if found else None

    def clear(self) -> None:
        """Remove every checkpoint: the run starts anew."""
        for path in committed(self.directory):
            self._remove(path)

    def save(
        self, state: TrainState, record: dict[str, Any], *, score: float | None = None, score_of: str | None = None
    ) -> None:
        """Write a checkpoint of this very moment; returns once the tensors are copied when asynchronous.

        On a layout all ranks call this at the same step.

        Args:
            state: what is saved; it may go on changing after the return.
            record: JSON-able facts of the recipe (loader place, what the run is of, best score).
            score: validation loss at this step, lower is better.
            score_of: names the rows that it was measured on.
        """
        self.wait()
        name = f"step-{state.counters.step:06d}"
        writing = self.directory / f"{_WRITING}{name}"
        group = self._own_group(state)
        leads = rank_in(group) == 0
        if tell((self.directory / name).exists(), group):
            return
        with together(group):
            if leads:
                self.directory.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(writing, ignore_errors=True)
                writing.mkdir()
        with together(group):
            if not writing.is_dir():
                remedy = "choose an output on a file system that they share"
                raise CheckpointError("is not the same directory on all ranks", where=str(writing), remedy=remedy)
        tensors = tensors_of(state, self._trainable_only)
        scalars: dict[str, dict[str, Any]] = {}
        holders: dict[str, list[int]] = {}
        for ranks, (names, found) in told_once((list(tensors), _optimizer_scalars(state)), group):
            scalars = found | scalars
            for tensor in names:
                holders.setdefault(tensor, ranks)
        full_record = {
            **record,
            "counters": asdict(state.counters),
            "layout": _layout(state.mesh),
            "optimizer": scalars,
            "score": score,
            "score_of": score_of,
        }
        parts = blocks_to_write(tensors, holders, rank_in(group))
        random = (_random_file(state.mesh), randomness.capture())
        if not self._asynchronous:
            self._write_aside(parts, random, writing, name, full_record)
            self.wait()
            return
        # One staging copy, then a thread of our own, which talks to other ranks' through a group of its own.
        parts = [replace(part, values=part.values.to("cpu", copy=True)) for part in parts]
        arguments = (parts, random, writing, name, full_record)
        self._writer = threading.Thread(target=self._write_aside, args=arguments, name="checkpoint-writer")
        self._writer.start()

    def wait(self) -> None:
        """Return once the checkpoint being written is committed.

        Raises:
            CheckpointError: if it could not be written (disk full, no permission).
        """
        self.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                raise failure
            raise CheckpointError(
                f"the checkpoint could not be written ({first_line(failure)})",
                where=str(self.directory),
                remedy="free some space or choose another output",
            ) from failure

    def join(self) -> None:
        """Return once no checkpoint is being written, whether that went well or not."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def load(self, state: TrainState, checkpoint: Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Read a committed checkpoint into `state`, random states included, and return its record.

        Args:
            state: of the same model and, unless `weights_only`, the same optimizer.
            checkpoint: one of `committed`.
            weights_only: leave optimizer states and random states as they are.

        Raises:
            CheckpointError: if it is damaged or was taken of other parameters.
        """
        group = dist.group.WORLD if state.mesh is not None else None
        with together(group):
            record = read_record(checkpoint)
            try:
                rank, ranks = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
                stored = stored_tensors(checkpoint / _TENSORS, rank, ranks)
            except CheckpointError as error:
                raise CheckpointError(error.what, where=error.where, remedy=_USE_OLDER) from error
        tensors = tensors_of(state, self._trainable_only)
        if weights_only:
            tensors, stored = _weights(tensors), _weights(stored)
        needed = {name for _, names in told_once(list(tensors), group) for name in names}
        if missing := sorted(needed - stored.keys()) or sorted(stored.keys() - needed):
            raise CheckpointError(
                f"was taken of other parameters (for instance {missing[0]})",
                where=str(checkpoint),
                remedy="resume with the same model, adapter and optimizer, or use --resume never",
            )
        with together(group):
            for name, tensor in tensors.items():  # a load would cast without a word
                size, dtype = stored[name].shape, stored[name].dtype
                if size != tensor.shape or dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{name} is {dtype} {list(size)} and the run needs {tensor.dtype} {list(tensor.shape)}",
                        where=str(checkpoint),
                        remedy="resume with the same model, adapter and optimizer, or use --resume never",
                    )
            read(tensors, stored)
            with reading(checkpoint):
                state.counters = Counters(**record["counters"])
                if not weights_only:
                    _restore_optimizer_scalars(state, record["optimizer"])
                    states = random_states(checkpoint, state.mesh)
            if not weights_only and states is not None:
                with reading(checkpoint, _random_file(state.mesh)):
                    randomness.restore(states)
        return record

    def _own_group(self, state: TrainState) -> Group | None:
        """Ranks that write together; not training's own group, since writing goes on beside training."""
        if state.mesh is not None and self._group is None:
            self._group = spare_group(_PATIENCE)
        return self._group

    def _write_aside(
        self,
        parts: list[Block],
        random: tuple[str, dict[str, Any]],
        writing: Path,
        name: str,
        record: dict[str, Any],
    ) -> None:
        """What each rank does after the copies are made; rank 0 commits when all have written."""
        group = self._group
        try:
            with together(group):
                (writing / _TENSORS).mkdir(exist_ok=True)
                if parts:
                    write(parts, writing / _TENSORS / f"rank-{rank_in(group):05d}.safetensors")
                write_json(writing / random[0], random[1])
            with together(group):
                if rank_in(group) == 0:
                    self._commit(writing, name, record)
        except BaseException as error:  # told by the next wait(), in the thread that trains
            self._failure = error

    def _commit(self, writing: Path, name: str, record: dict[str, Any]) -> None:
        write_json(writing / _RECORD, record)
        for directory in (writing / _TENSORS, writing):
            _sync_directory(directory)
        writing.rename(self.directory / name)
        _sync_directory(self.directory)
        self._prune()

    def _prune(self) -> None:
        found = committed(self.directory)
        kept = set(found[-self._keep :])
        if self._keep_best and (best := _best(found)) is not None:
            kept.add(best)
        for path in found:
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # The rename first, so that a crash in the middle of the removal leaves no half checkpoint.
        doomed = path.with_name(f"{_WRITING}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _weights(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.startswith("model.")}


def _optimizer_scalars(state: TrainState) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
        for parameter, values in state.optimizer.state.items()
    }


def _restore_optimizer_scalars(state: TrainState, scalars: dict[str, dict[str, Any]]) -> None:
    names = {parameter: name for name, parameter in state.model.named_parameters()}  # on a layout of this rank's stage
    for parameter, values in state.optimizer.state.items():
        values.update(scalars[names[parameter]])


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
