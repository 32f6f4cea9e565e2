"""What a teacher says about the training rows, found once, kept beside the run, and read from there in every step."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from luthier.batch import Batch
from luthier.config import RunConfig
from luthier.config.teaching import DistillConfig
from luthier.data.loader import Rows, iterate_once
from luthier.engine.distill import likeliest
from luthier.engine.network import Network
from luthier.errors import ModelError
from luthier.hf.source import load_config, resolve
from luthier.hf.together import tell
from luthier.recipes.run import Run
from luthier.recipes.run_directory import write_text
from luthier.recipes.setup import unpackable
from luthier.report.progress import stage

logger = logging.getLogger(__name__)

FOLDER = "teacher"
_MARK = "of.json"
_KNOWN = "rows.bin"
_TYPES = {"teacher_ids": np.int32, "teacher_logprobs": np.float32}


class Taught:
    """The likeliest tokens of a teacher at each position of the training rows that the run comes to, on disk.

    Args:
        run: whose rows; they are not streamed (`DistillConfig.check`).
        method: names the teacher and how many tokens.
        load: loads the teacher; called where rows have not been asked about, or the files are of other rows, or of a
            teacher that was another than the one that is there now; if none is, what the last one said holds. All data
            ranks call this, each fills in its part, and all see the directory.
    """

    def __init__(self, run: Run, method: DistillConfig, load: Callable[[], Network]) -> None:
        assert isinstance(run.rows, Rows)
        assert method.top_k is not None
        self._ends = np.cumsum(run.rows.lengths)
        shape = (int(self._ends[-1]), method.top_k)
        folder = run.directory.path / FOLDER
        mark, mesh = folder / _MARK, run.state.mesh
        group = dist.group.WORLD if mesh is not None else None
        if run.state.is_main:  # the others may see the teacher's files with other times
            of = {
                "rows": run.rows.fingerprint,
                "method": _asked(method),
                "precision": [run.config.train.precision, str(run.state.outline.dtype)],
                "teacher": identity_of(run.config, method),
            }
            there = _holds(mark, of)
            if not there:
                folder.mkdir(exist_ok=True)
                mark.unlink(missing_ok=True)
                for name in _TYPES:
                    _open(folder, name, "w+", shape)
                np.memmap(folder / _KNOWN, dtype=np.bool_, mode="w+", shape=len(run.rows))
                write_text(mark, json.dumps(of))
        known = np.memmap(folder / _KNOWN, np.bool_, "r+", shape=len(run.rows)) if run.state.is_main else None
        self._known: np.ndarray = tell(None if known is None else np.array(known), group)
        wanted = run.loader.ahead()
        missing = wanted[~self._known[wanted]]
        if len(missing):
            self._fill(run, method, load(), missing, {name: _open(folder, name, "r+", shape) for name in _TYPES})
            if mesh is not None:
                mesh.wait()
            self._known[missing] = True
            if known is not None:
                known[missing] = True
                known.flush()
        self._arrays = {name: _open(folder, name, "r", shape) for name in _TYPES}

    def beside(self, batch: Batch) -> Batch:
        """A microbatch with what the teacher says at its positions."""
        assert all(self._known[row.number] for row in batch.rows if row.number >= 0), "the teacher was not asked"
        spans = [self._span(row.number) for row in batch.rows]
        width = next(iter(self._arrays.values())).shape[1]
        inputs: dict[str, torch.Tensor] = {}
        for name, array in self._arrays.items():
            parts = [np.zeros((1, width), array.dtype) if span is None else array[span] for span in spans]
            inputs[name] = torch.from_numpy(np.concatenate(parts))
        return replace(batch, inputs=inputs)

    def _span(self, number: int) -> slice | None:
        """Where a row's positions are; None for what only fills a microbatch."""
        return None if number < 0 else slice(int(self._ends[number - 1]) if number else 0, int(self._ends[number]))

    def _fill(
        self, run: Run, method: DistillConfig, teacher: Network, numbers: np.ndarray, arrays: dict[str, Any]
    ) -> None:
        assert isinstance(run.rows, Rows)
        assert method.top_k is not None
        mesh = run.state.mesh
        ranks = {"rank": mesh.data_rank, "world_size": mesh.data_ranks} if mesh is not None else {}
        packing = run.config.data.packing and not unpackable(teacher, run.rows)
        rows, done = run.rows.some(numbers), 0
        with stage("asking the teacher") as told:
            for batch in iterate_once(rows, run.config.data.sequence_length, packing=packing, **ranks):
                found = dict(zip(_TYPES, likeliest(teacher, batch, method.top_k, method.temperature), strict=True))
                start = 0
                for row in batch.rows:
                    span = self._span(int(numbers[row.number]) if row.number >= 0 else -1)
                    if span is None:
                        continue
                    size = span.stop - span.start
                    for name, values in found.items():
                        arrays[name][span] = values[start : start + size].cpu().numpy()
                    start += size
                    done += 1
                told(done, len(rows))
        for array in arrays.values():
            array.flush()


def kept(config: RunConfig, method: DistillConfig) -> bool:
    """Whether a run's directory has what this teacher said, of whichever rows."""
    found = _read(config.output / FOLDER / _MARK)
    return method.precompute and found is not None and found.get("method") == _asked(method)


def identity_of(config: RunConfig, method: DistillConfig) -> str | None:
    """What tells one teacher, with its adapter, from another, without its weights being read: names, sizes and times of
    its files, the commit of a Hub model, what makes a debug model. None where it is not there."""
    try:
        source = resolve(method.teacher, revision=method.teacher_revision)
        found: list[Any]
        if source.path is not None:
            found = _files(source.path / source.gguf_file if source.gguf_file else source.path)
        else:
            of = load_config(source, trust_remote_code=config.trust_remote_code)
            commit = getattr(of, "_commit_hash", None)
            found = [commit] if commit else [of.to_dict(), config.seed]
        if method.teacher_adapter is not None:
            found += _files(Path(method.teacher_adapter))
    except (ModelError, OSError):
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _files(path: Path) -> list[Any]:
    """Name, size and time of a file, or of each in a directory."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _asked(method: DistillConfig) -> dict[str, Any]:
    """What decides, beside the rows and the teacher's weights, what it says."""
    return method.model_dump(mode="json", exclude={"divergence", "beta", "cross_entropy"})


def _holds(mark: Path, of: dict[str, Any]) -> bool:
    """Whether what is kept is what would be found now, or would have been while the teacher was there."""
    found = _read(mark)
    if found is None or of["teacher"] is not None:
        return found == of
    holds = found | {"teacher": None} == of
    if holds:
        logger.warning("the teacher is not there any more: going on with what it has said")
    return holds


def _read(mark: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _open(folder: Path, name: str, mode: Any, shape: tuple[int, int]) -> Any:
    return np.memmap(folder / f"{name}.bin", dtype=_TYPES[name], mode=mode, shape=shape)
