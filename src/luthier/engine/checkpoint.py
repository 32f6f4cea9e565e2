"""Checkpoints: tensors by torch's DCP in safetensors files, everything else as JSON, committed by one rename.

A step is written into `checkpoints/.writing-step-000050`, flushed to disk, then renamed to `step-000050`. Only the
renamed directory is a checkpoint; whatever a crash leaves behind has the other name and is removed by the next run that
owns the directory (`Checkpointer.tidy`), never by somebody who only reads.
Optimizer states are stored by parameter name, so they can be read on any layout, and no pickle is involved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from luthier.engine import randomness
from luthier.engine.state import Counters, TrainState
from luthier.errors import CheckpointError

_COMMITTED = re.compile(r"step-(\d{6,})")
_WRITING = ".writing-"
_RECORD = "state.json"
_TENSORS = "tensors"
FILE_BYTES = 256 << 20
"""A file of tensors ends before it would grow beyond this."""
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
def reading(checkpoint: Path) -> Iterator[None]:
    """Around whatever looks into a record: a part that is missing or no such thing means that the record is damaged.

    Raises:
        CheckpointError: it is.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _damaged(checkpoint, error) from error


def _reason(error: BaseException) -> str:
    """What went wrong in one line; DCP hands the errors of all ranks on with their tracebacks as text."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _damaged(checkpoint: Path, error: Exception) -> CheckpointError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return CheckpointError(f"{_RECORD} is damaged ({reason})", where=str(checkpoint), remedy=_USE_OLDER)


def _score(checkpoint: Path) -> float | None:
    """The validation loss that a checkpoint was taken at; one whose record is damaged is nobody's best."""
    try:
        score = read_record(checkpoint).get("score")
    except CheckpointError:
        return None
    return float(score) if isinstance(score, int | float) else None


def check_unchanged(taken_of: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuse to go on with other data, another batch or another model than the checkpoint was taken of.

    Raises:
        CheckpointError: naming each thing that changed, with both values.
    """
    changed = [
        f"{key} was {taken_of.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(taken_of.keys() | now.keys())
        if taken_of.get(key) != now.get(key)
    ]
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

    def save(self, state: TrainState, record: dict[str, Any], *, score: float | None = None) -> None:
        """Write a checkpoint of this very moment; returns once the tensors are copied when asynchronous.

        Args:
            state: what is saved; it may go on changing after the return.
            record: JSON-able facts of the recipe (loader place, what the run is of, best score).
            score: validation loss at this step, lower is better.
        """
        self.wait()
        name = f"step-{state.counters.step:06d}"
        if (self.directory / name).exists():
            return
        full_record = {
            **record,
            "counters": asdict(state.counters),
            "randomness": randomness.capture(),
            "optimizer": _optimizer_scalars(state),
            "score": score,
        }
        writing = self.directory / f"{_WRITING}{name}"
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        tensors = self._tensors(state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if not self._asynchronous:
                self._write_aside(tensors, writing, name, full_record)
                self.wait()
                return
        # One staging copy, then a thread of our own: DCP's async_save leaves a process pool behind in short runs, and
        # the commit must follow the last byte anyway.
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        self._writer = threading.Thread(
            target=self._write_aside, args=(copies, writing, name, full_record), name="checkpoint-writer"
        )
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
                f"the checkpoint could not be written ({_reason(failure)})",
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
        record = read_record(checkpoint)
        reader = HuggingFaceStorageReader(str(checkpoint / _TENSORS))
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:  # safetensors raises its own untyped errors for a damaged file
            raise CheckpointError(
                f"tensors cannot be read ({error})", where=str(checkpoint), remedy=_USE_OLDER
            ) from error
        if not stored:
            raise CheckpointError("its tensors are missing", where=str(checkpoint), remedy=_USE_OLDER)
        tensors = self._tensors(state)
        if weights_only:
            tensors, stored = _weights(tensors), _weights(stored)
        if missing := sorted(tensors.keys() - stored.keys()) or sorted(stored.keys() - tensors.keys()):
            raise CheckpointError(
                f"was taken of other parameters (for instance {missing[0]})",
                where=str(checkpoint),
                remedy="resume with the same model, adapter and optimizer, or use --resume never",
            )
        for name, tensor in tensors.items():  # a load would cast without a word
            there = stored[name]
            assert isinstance(there, TensorStorageMetadata)
            size, dtype = there.size, there.properties.dtype
            if size != tensor.shape or dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name} is {dtype} {list(size)} and the run needs {tensor.dtype} {list(tensor.shape)}",
                    where=str(checkpoint),
                    remedy="resume with the same model, adapter and optimizer, or use --resume never",
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(dict(tensors), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
            except (ValueError, RuntimeError, dcp.api.CheckpointException) as error:
                raise CheckpointError(f"tensors do not fit ({_reason(error)})", where=str(checkpoint)) from error
        with reading(checkpoint):
            state.counters = Counters(**record["counters"])
            if not weights_only:
                _restore_optimizer_scalars(state, record["optimizer"])
                randomness.restore(record["randomness"])
        return record

    def _tensors(self, state: TrainState) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        names = {parameter: name for name, parameter in state.model.named_parameters()}
        for parameter, name in names.items():
            if parameter.requires_grad or not self._trainable_only:
                tensors[f"model.{name}"] = parameter.detach()
        for parameter, values in state.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{names[parameter]}.{key}"] = value
        return tensors

    def _write_aside(self, tensors: dict[str, torch.Tensor], writing: Path, name: str, record: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                _write(tensors, writing)
            self._commit(writing, name, record)
        except BaseException as error:  # told by the next wait(), in the thread that trains
            self._failure = error

    def _commit(self, writing: Path, name: str, record: dict[str, Any]) -> None:
        with (writing / _RECORD).open("w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        for directory in (writing / _TENSORS, writing):
            _sync_directory(directory)
        writing.rename(self.directory / name)
        _sync_directory(self.directory)
        self._prune()

    def _prune(self) -> None:
        found = committed(self.directory)
        kept = set(found[-self._keep :])
        if self._keep_best:
            scores = {path: score for path in found if (score := _score(path)) is not None}
            if scores:
                kept.add(min(scores, key=lambda path: scores[path]))
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


def _write(tensors: dict[str, torch.Tensor], writing: Path) -> None:
    # A file is serialised in memory before it is written, so one file for all would hold everything a second time.
    files: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        files[name] = number
        size += tensor.nbytes
    writer = HuggingFaceStorageWriter(
        str(writing / _TENSORS), fqn_to_index_mapping=files if number > 1 else None, save_distributed=True
    )
    dcp.save(dict(tensors), storage_writer=writer, no_dist=not torch.distributed.is_initialized())


def _optimizer_scalars(state: TrainState) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
        for parameter, values in state.optimizer.state.items()
    }


def _restore_optimizer_scalars(state: TrainState, scalars: dict[str, dict[str, Any]]) -> None:
    parameters = dict(state.model.named_parameters())
    for name, values in scalars.items():
        state.optimizer.state[parameters[name]].update(values)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
