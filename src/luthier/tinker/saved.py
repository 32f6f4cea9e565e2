"""States of a client on disk: written aside, then renamed, and read back only into what they were taken of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luthier.adapters import adapted
from luthier.engine.checkpoint import Checkpointer, check_unchanged, committed, read_record, reading
from luthier.engine.identity import model_digest
from luthier.engine.state import TrainState
from luthier.errors import CheckpointError
from luthier.hf.together import rank_in, together


def save(state: TrainState, target: Path, *, overwrite: bool, adapters_only: bool) -> None:
    """Write what a client has learnt, and its optimizer.

    Args:
        state: on a layout all ranks call this.
        target: the directory to be.
        overwrite: replace one that is there, all of it.
        adapters_only: leave frozen weights out.

    Raises:
        CheckpointError: it is there already, or cannot be written.
    """
    group = dist.group.WORLD if state.mesh is not None else None
    aside, doomed = (target.with_name(f".{target.name}.{end}") for end in ("aside", "doomed"))
    record = {"client": identity(state)}
    with together(group):
        if target.exists() and not overwrite:
            raise CheckpointError("it is there already", where=str(target), remedy="overwrite=True replaces it")
        if rank_in(group) == 0:
            for leftover in (aside, doomed):
                shutil.rmtree(leftover, ignore_errors=True)
    writer = Checkpointer(aside, keep=1, keep_best=False, trainable_only=adapters_only, asynchronous=False)
    writer.save(state, record)
    with together(group):
        if rank_in(group) == 0:
            if target.exists():
                target.rename(doomed)
            committed(aside)[-1].rename(target)
            for leftover in (aside, doomed):
                shutil.rmtree(leftover, ignore_errors=True)


def load(state: TrainState, source: Path, *, optimizer: bool) -> None:
    """Read a state back; gradients are the caller's to drop.

    Args:
        state: of the same base model and adapters.
        source: what `save` wrote.
        optimizer: read its moments too; otherwise they begin anew.

    Raises:
        CheckpointError: there is none, it is damaged, or it was taken of something else.
    """
    record = read_record(source)
    with reading(source):
        check_unchanged(record["client"], identity(state), source)
        adapters_only = bool(record["client"]["adapters"])
    reader = Checkpointer(source.parent, trainable_only=adapters_only)
    reader.load(state, source, weights_only=not optimizer)
    if not optimizer:
        for values in state.optimizer.state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                else:
                    values[key] = 0


def identity(state: TrainState) -> dict[str, Any]:
    """What a state must have been taken of to be read into this one: the base, and how it is adapted."""
    group = dist.group.WORLD if state.mesh is not None else None
    specs = sorted({(layer.lora_spec.rank, layer.lora_spec.alpha) for _, layer in adapted(state.outline)})
    return {
        "model": model_digest(state.model, group) if specs else type(state.outline).__name__,
        "adapters": [{"rank": rank, "alpha": alpha} for rank, alpha in specs],
    }
