"""Adapters written as PEFT does, from one process or from all ranks that hold parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from luthier.adapters import peft_experts
from luthier.adapters.aside import aside_of, rename
from luthier.adapters.embedding import LoraEmbedding
from luthier.adapters.experts import Adapted, ExpertsAdapter, adapted
from luthier.adapters.layer import LoraLayer
from luthier.adapters.peft_config import CONFIG_FILE, WEIGHT_FILES, peft_config_json
from luthier.adapters.peft_files import EMBEDDING, LENGTHS, MATRIX, PREFIX, WRAPPERS
from luthier.adapters.peft_rows import ids_for_peft
from luthier.adapters.principal import filed_spec
from luthier.adapters.rows import SUFFIX as ROWS
from luthier.adapters.rows import rows_of
from luthier.adapters.structure import (
    both_ends_trained,
    wholly_trained,
)
from luthier.errors import ModelError
from luthier.hf.anatomy import describe
from luthier.hf.experts import find_experts
from luthier.hf.gather import gather, plain_class, reshard
from luthier.hf.load import build_on_meta
from luthier.hf.tensor_file import Entry, TensorFile
from luthier.hf.together import Group, exchange, global_rank, rank_in, together


def save_peft(
    model: Any,
    directory: str | Path,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    group: Group | None = None,
) -> Path:
    """Write a model's adapters, and the modules trained whole, as PEFT does.

    Args:
        model: adapters in place; whole, or what this rank holds of it.
        directory: made if it is not there. A reader never finds a half-written adapter in it: everything is written
            aside and renamed, the config last.
        base_model: name or path of the base, for whoever loads the files.
        revision: its revision on the Hub.
        group: all ranks that hold parts of the model, all of which call this and see the directory; each writes what
            it holds. None where this process holds it whole.

    Returns:
        the directory.

    Raises:
        ModelError: the model carries no adapters.
    """
    reshard(model)
    layers = dict(adapted(model))
    trained = wholly_trained(model)
    own = _own_tensors(model, layers, trained)
    told = exchange(
        (
            {name: filed_spec(layer) for name, layer in layers.items()},
            any(layer.lora_shape.transposed for layer in layers.values() if isinstance(layer, LoraLayer)),
            [Entry.of(key, _as_filed(key, value)) for key, value in _on_meta(own).items()],
        ),
        group,
    )
    plain = build_on_meta(cast(Any, plain_class(model)), model.config)
    names = peft_experts.names_in_config(plain, {name: None for found, *_ in told for name in found})
    specs = {names[name]: spec for found, *_ in told for name, spec in found.items()}
    if not specs:
        raise ModelError("there are no adapters to save", remedy="export the whole model instead")
    writers: dict[str, int] = {}
    entries: dict[str, Entry] = {}
    for rank, (*_, found) in enumerate(told):
        for entry in found:
            writers.setdefault(entry.name, rank)
            entries.setdefault(entry.name, entry)
    parameters = peft_experts.targets(plain, specs)
    text = peft_config_json(
        ranks={name: spec.rank for name, spec in specs.items()},
        alphas={name: spec.alpha for name, spec in specs.items()},
        # PEFT reads no dropout beside adapted parameters; it would only matter to who trains on.
        dropout=0.0 if parameters else max(spec.dropout for spec in specs.values()),
        rslora=any(spec.rslora for spec in specs.values()),
        dora=any(spec.dora for spec in specs.values()),
        modules=trained,
        names=[name for name, _ in plain.named_modules()],
        parameters=parameters,
        ties=both_ends_trained(model, describe(plain)),
        transposed=any(transposed for _, transposed, _ in told),
        base_model=base_model,
        revision=revision,
        tokens=ids_for_peft(model),
        task="SEQ_CLS" if type(plain).__name__.endswith("ForSequenceClassification") else "CAUSAL_LM",
    )
    target = Path(directory)
    leads = rank_in(group) == 0
    aside = aside_of(target / WEIGHT_FILES[0])
    with together(group):
        if leads:
            target.mkdir(parents=True, exist_ok=True)
            for stale in (CONFIG_FILE, WEIGHT_FILES[1]):
                (target / stale).unlink(missing_ok=True)
            TensorFile(aside, entries.values()).close()
    with together(group):
        _write_own(aside, list(entries.values()), own, writers, group)
    with together(group):
        if leads:
            rename(aside, target / WEIGHT_FILES[0])
            aside = aside_of(target / CONFIG_FILE)
            aside.write_text(text, encoding="utf-8")
            rename(aside, target / CONFIG_FILE)
    return target


_Own = dict[str, Tensor | tuple[Tensor, Tensor]]
"""key in PEFT's file -> this rank's part of what it stands for; a pair is written end to end."""


def _own_tensors(model: Any, layers: Mapping[str, Adapted], trained: Sequence[str]) -> _Own:
    own: _Own = {}
    filed = {name: name for name in layers}
    for group in find_experts(model):
        wanted = [name for key in group.sliced if (name := f"{group.name}.{key}") in layers]
        filed |= {name: peft_experts.in_file(name, wanted) for name in wanted}
    for name, layer in layers.items():
        name = WRAPPERS.sub("", filed[name])
        if not isinstance(layer, ExpertsAdapter) and layer.lora_spec.dora:
            own[f"{PREFIX}{name}{LENGTHS}"] = layer.lora_magnitude_vector.weight
        if isinstance(layer, LoraEmbedding):
            own[f"{PREFIX}{name}.{EMBEDDING}A"] = layer.lora_A.weight
            own[f"{PREFIX}{name}.{EMBEDDING}B"] = layer.lora_B.weight
            continue
        own[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A.weight
        up = layer.lora_B.weight if isinstance(layer, ExpertsAdapter) else layer.lora_B.effective.detach()
        own[f"{PREFIX}{name}.lora_B.weight"] = up
        if (first := getattr(layer, "lora_first", None)) is not None:  # the base in files is as it was (`principal`)
            own[f"{PREFIX}{name}.lora_A.weight"] = (layer.lora_A.weight, first[0])
            own[f"{PREFIX}{name}.lora_B.weight"] = (up, -first[1])
    for name, rows in rows_of(model).items():
        own[f"{PREFIX}{name}{ROWS}"] = rows.trainable_tokens_delta
    inside = tuple(f"{name}." for name in trained)
    for key, value in model.state_dict(keep_vars=True).items():
        if (name := WRAPPERS.sub("", key)).startswith(inside):
            own[f"{PREFIX}{name}"] = value
    return own


def _write_own(
    path: Path, entries: Sequence[Entry], own: _Own, writers: Mapping[str, int], group: Group | None
) -> None:
    """Gather and write one tensor after the other; ranks that hold the same take the same in the same order."""
    failure: Exception | None = None
    file = TensorFile(path, entries, create=False)
    for entry in entries:
        if entry.name not in own:
            continue
        found = own[entry.name]
        parts = found if isinstance(found, tuple) else (found,)
        gathered = [gather(part, global_rank(group, writers[entry.name])) for part in parts]
        value = _joined(entry.name, gathered)
        if value is not None and writers[entry.name] == rank_in(group) and failure is None:
            try:
                file.write(entry.name, _as_filed(entry.name, value))
            except (
                OSError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # others wait for what this rank holds, so it goes on giving
                failure = error
    file.close()
    if failure is not None:
        raise failure


def _joined(key: str, parts: Sequence[Tensor | None]) -> Tensor | None:
    """Parts one after the other, along the rank; None where they lie elsewhere."""
    here = [part for part in parts if part is not None]
    return None if not here else here[0] if len(here) == 1 else torch.cat(here, 0 if "lora_A" in key else 1)


def _on_meta(own: _Own) -> dict[str, Tensor]:
    """The whole tensors' shapes and dtypes."""
    made = {}
    for key, found in own.items():
        parts = found if isinstance(found, tuple) else (found,)
        made[key] = _joined(key, [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts])
    return {key: value for key, value in made.items() if value is not None}


def _as_filed(key: str, value: Tensor) -> Tensor:
    """A tensor as PEFT lays it: stacks of experts' adapters become matrices."""
    if value.dim() != 3 or (found := MATRIX.fullmatch(key)) is None:
        return value
    return peft_experts.flat(found["side"], value)
