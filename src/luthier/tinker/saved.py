"""A client on disk: its state, to train on from, and its weights alone, to sample from. Both are written aside, then
renamed, and read back only into what they were taken of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luthier.adapters import adapted, beside, find_siblings, load_peft, save_peft, wholly_trained
from luthier.engine.checkpoint import Checkpointer, check_unchanged, committed, read_record, reading
from luthier.engine.identity import model_digest
from luthier.engine.state import TrainState
from luthier.errors import CheckpointError
from luthier.hf.load import load_model
from luthier.hf.save import replacing, save_model
from luthier.hf.source import EXPORT_MARK, resolve
from luthier.hf.together import Group, rank_in, together

_BASE, _WHOLE = "base", "model"


def save(
    state: TrainState,
    target: Path,
    *,
    overwrite: bool,
    adapters_only: bool,
    user_metadata: Mapping[str, str] | None = None,
) -> None:
    """Write what a client has learnt, and its optimizer.

    Args:
        state: on a layout all ranks call this.
        target: the directory to be.
        overwrite: replace one that is there, all of it.
        adapters_only: leave frozen weights out.
        user_metadata: a caller's own notes, kept in the record.

    Raises:
        CheckpointError: it is there already, or cannot be written.
    """
    group = _group(state)
    aside, doomed = target.with_name(f".{target.name}.aside"), _doomed(target)
    _bring_back(target, group)
    record = {"client": identity(state), "user_metadata": dict(user_metadata or {})}
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
    _bring_back(source, _group(state))
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


def save_for_sampler(state: TrainState, target: Path, *, user_metadata: Mapping[str, str] | None = None) -> None:
    """Write what a client has learnt and nothing else: adapters as PEFT's files, a model that trains whole as a
    directory that Transformers reads.

    Args:
        state: on a layout all ranks call this, and see the directory.
        target: the directory to be.
        user_metadata: a caller's own notes, kept in the mark beside the weights.

    Raises:
        CheckpointError: it is there already.
    """
    group = _group(state)
    with together(group):
        if target.exists():
            raise CheckpointError("it is there already", where=str(target), remedy="choose another name")
    notes = {f"user_metadata.{key}": value for key, value in (user_metadata or {}).items()}
    if next(adapted(state.outline), None) is None:
        with replacing(target, notes, group) as aside:
            save_model(state.model, aside / _WHOLE, tokenizer=None, group=group)
        return
    facts = notes if wholly_trained(state.model) else {_BASE: model_digest(state.model, group), **notes}
    with replacing(target, facts, group) as aside:
        save_peft(state.model, aside, base_model=state.source.text, revision=state.source.revision, group=group)


def load_for_sampler(base: Any, source: Path) -> Any:
    """A model with the weights that `save_for_sampler` wrote, in evaluation mode.

    Args:
        base: a model of this process over the same base, adapters in place or not. Its frozen weights are shared; it
            is left as it is.
        source: what was written.

    Raises:
        CheckpointError: it is nothing of the kind, or was taken of another base.
        ModelError: its files are damaged, or do not fit.
    """
    mark = source / EXPORT_MARK
    if not mark.is_file():
        remedy = "give what save_weights_for_sampler told"
        raise CheckpointError("it holds no weights for sampling", where=str(source), remedy=remedy)
    with reading(source, EXPORT_MARK):
        taken_of = json.loads(mark.read_text(encoding="utf-8")).get(_BASE)
    if (source / _WHOLE).is_dir():
        return load_model(resolve(str(source / _WHOLE)), dtype=base.dtype, device=base.device).requires_grad_(False)
    if taken_of is not None:
        check_unchanged({"base model": taken_of}, {"base model": model_digest(base)}, source)
    model = beside(base)
    load_peft(model, source)
    find_siblings(model)
    return model.requires_grad_(False).eval()


def _doomed(target: Path) -> Path:
    """Where what is being replaced lies until the new one is in its place."""
    return target.with_name(f".{target.name}.doomed")


def _bring_back(target: Path, group: Group | None) -> None:
    """Put a state back that was taken away by a process that ended before it could put the new one there."""
    with together(group):
        if rank_in(group) == 0 and not target.exists() and _doomed(target).exists():
            _doomed(target).rename(target)


def identity(state: TrainState) -> dict[str, Any]:
    """What a state must have been taken of to be read into this one: the base, and how it is adapted."""
    specs = sorted({(layer.lora_spec.rank, layer.lora_spec.alpha) for _, layer in adapted(state.outline)})
    return {
        "model": model_digest(state.model, _group(state)) if specs else type(state.outline).__name__,
        "adapters": [{"rank": rank, "alpha": alpha} for rank, alpha in specs],
    }


def _group(state: TrainState) -> Group | None:
    return dist.group.WORLD if state.mesh is not None else None
