"""What a teacher says about the training rows, found once, kept beside the run, and read from there in every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luthier.batch import Batch
from luthier.config.teaching import DistillConfig
from luthier.data.loader import Rows, iterate_once
from luthier.engine.distill import likeliest
from luthier.engine.network import Network
from luthier.recipes.run import Run
from luthier.recipes.run_directory import write_text
from luthier.report.progress import stage

FOLDER = "teacher"
_TYPES = {"teacher_ids": np.int32, "teacher_logprobs": np.float32}


class Taught:
    """The likeliest tokens of a teacher at each position of each training row, on disk.

    Args:
        run: whose rows; they are not streamed (`DistillConfig.check`).
        method: names the teacher and how many tokens.
        load: loads the teacher; called where the files are not there, or are of other rows or of another teacher. All
            data ranks call this, each fills in its part, and all see the directory.
    """

    def __init__(self, run: Run, method: DistillConfig, load: Callable[[], Network]) -> None:
        assert isinstance(run.rows, Rows)
        assert method.top_k is not None
        self._ends = np.cumsum(run.rows.lengths)
        shape = (int(self._ends[-1]), method.top_k)
        folder = run.directory.path / FOLDER
        of = {
            "rows": run.rows.fingerprint,
            **method.model_dump(mode="json", exclude={"divergence", "beta", "cross_entropy"}),
        }
        mark, mesh = folder / "of.json", run.state.mesh
        there = mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == of
        if mesh is not None:
            mesh.wait()  # all have looked before any of them writes
        if not there:
            if run.state.is_main:
                folder.mkdir(exist_ok=True)
                mark.unlink(missing_ok=True)
                for name in _TYPES:
                    _open(folder, name, "w+", shape)
            if mesh is not None:
                mesh.wait()
            self._fill(run, method, load(), {name: _open(folder, name, "r+", shape) for name in _TYPES})
            if mesh is not None:
                mesh.wait()
            if run.state.is_main:
                write_text(mark, json.dumps(of))
        self._arrays = {name: _open(folder, name, "r", shape) for name in _TYPES}

    def beside(self, batch: Batch) -> Batch:
        """A microbatch with what the teacher says at its positions."""
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

    def _fill(self, run: Run, method: DistillConfig, teacher: Network, arrays: dict[str, Any]) -> None:
        assert isinstance(run.rows, Rows)
        assert method.top_k is not None
        mesh = run.state.mesh
        ranks = {"rank": mesh.data_rank, "world_size": mesh.data_ranks} if mesh is not None else {}
        packing = run.config.data.packing and not teacher.packing_fault
        done = 0
        with stage("asking the teacher") as told:
            for batch in iterate_once(run.rows, run.config.data.sequence_length, packing=packing, **ranks):
                found = dict(zip(_TYPES, likeliest(teacher, batch, method.top_k, method.temperature), strict=True))
                start = 0
                for row in batch.rows:
                    span = self._span(row.number)
                    if span is None:
                        continue
                    size = span.stop - span.start
                    for name, values in found.items():
                        arrays[name][span] = values[start : start + size].cpu().numpy()
                    start += size
                    done += 1
                told(done, len(run.rows))
        for array in arrays.values():
            array.flush()


def _open(folder: Path, name: str, mode: Any, shape: tuple[int, int]) -> Any:
    return np.memmap(folder / f"{name}.bin", dtype=_TYPES[name], mode=mode, shape=shape)
