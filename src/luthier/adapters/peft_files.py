"""Adapters read from the files that PEFT and `peft_save` write: `adapter_config.json`, `adapter_model.safetensors`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from luthier.adapters import peft_experts
from luthier.adapters.experts import StackShape, adapted, stack_shape
from luthier.adapters.layer import LoraSpec, is_adapter_weight
from luthier.adapters.peft_config import CONFIG_FILE, PeftConfig, read_peft_config, read_tensors
from luthier.adapters.peft_rows import in_order, tokens_in_file
from luthier.adapters.rows import SUFFIX as ROWS
from luthier.adapters.rows import attach_rows, rows_of, tie_rows
from luthier.adapters.structure import (
    attach_all,
    freeze,
    part_when_cut,
    settle_ties,
    untie,
    wholly_trained,
)
from luthier.errors import ModelError
from luthier.hf.anatomy import describe
from luthier.hf.experts import find_experts
from luthier.hf.linear import LinearShape, linear_shape
from luthier.hf.shards import fill

PREFIX = "base_model.model."
MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
EMBEDDING = "lora_embedding_"
"""How PEFT's names of A and B beside a table begin."""
LENGTHS = ".lora_magnitude_vector"
"""PEFT's name for DoRA's lengths in files, which is not that of the parameter."""
WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def load_peft(
    model: Any,
    directory: str | Path,
    *,
    dropout: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Put the adapters of PEFT files beside a model's layers, and let them, and nothing else, train.

    On meta only the structure is made; call it again when the weights are there, and the values are read.

    Args:
        model: a Transformers model without adapters, or with those that an earlier call put in place.
        directory: what PEFT, or `save_peft`, wrote.
        dropout: instead of the files' own.
        dtype: of the adapters; each base weight's when left out.

    Raises:
        ModelError: the files cannot be read, use a part of PEFT that is not supported, or do not fit the model: a key
            without a place, a layer without its key, another shape.
    """
    config = read_peft_config(Path(directory))
    weights = peft_experts.from_file(model, config, _read_weights(config))
    trained = _saved_whole(model, config)
    specs = _specs(model, config, weights, dropout)
    present = {name: layer.lora_spec.rank for name, layer in adapted(model)}
    if not present:
        attach_all(model, specs, trained, dtype)
        if (tokens := tokens_in_file(config.tokens, model)) is not None:
            attach_rows(model, tokens, dtype, trained)
    elif present != {name: spec.rank for name, spec in specs.items()}:
        raise ModelError("the model carries other adapters than these files hold", where=str(config.directory))
    weights = in_order(config.tokens, weights, model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        _fill(model, config, weights)
    elif _ends_differ(model, weights):
        part_when_cut(model)
    freeze(model)


@torch.no_grad()
def load_part(model: Any, directory: str | Path) -> None:
    """Read the values of adapters into a rank's part of a model; `load_peft` has checked the files and made their
    places while the model was whole and on meta.

    Args:
        model: this rank's part of it, the weights in place.
        directory: the same.
    """
    config = read_peft_config(Path(directory))
    weights = peft_experts.from_file(model, config, _read_weights(config), part=True)
    weights = in_order(config.tokens, weights, model)
    trained = wholly_trained(model)
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for key, value in weights.items():
        name = key.replace(".base_layer.", ".")
        ours = ".lora_" in name or is_adapter_weight(name) or any(name.startswith(f"{whole}.") for whole in trained)
        if ours and name in places:  # else it is another stage's
            fill(places[name], value)


def _saved_whole(model: Any, config: PeftConfig) -> list[str]:
    """Full names of the modules that the files hold whole, none inside another."""
    anatomy = describe(model)
    ends = {anatomy.embedding, anatomy.head}
    both = config.ties and anatomy.tied and any(end and config.saves_whole(end) for end in ends)
    found: list[str] = []
    for name, _ in model.named_modules():
        wanted = name and (config.saves_whole(name) or (both and name in ends))
        if wanted and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _read_weights(config: PeftConfig) -> dict[str, Tensor]:
    """name in the model -> tensor, PEFT's and other tools' wrappings taken off the name."""
    raw = read_tensors(config.directory)
    named = {WRAPPERS.sub("", key).removeprefix(PREFIX): value for key, value in raw.items()}
    renamed = {f"{key}.weight" if key.endswith(LENGTHS) else key: value for key, value in named.items()}
    return {re.sub(rf"\.{EMBEDDING}([AB])$", r".lora_\1.weight", key): value for key, value in renamed.items()}


def _specs(
    model: nn.Module, config: PeftConfig, weights: dict[str, Tensor], dropout: float | None
) -> dict[str, LoraSpec]:
    """How each layer is adapted; the tensors say which and of what rank, and the config must agree."""
    where = str(config.directory)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if found := MATRIX.fullmatch(key):
            sides.setdefault(found["layer"], {})[found["side"]] = value
    shapes: dict[str, LinearShape | StackShape]
    shapes = {name: linear for name, module in model.named_modules() if (linear := linear_shape(module))}
    embedding = describe(cast(Any, model)).embedding
    if isinstance(table := model.get_submodule(embedding), nn.Embedding):
        shapes[embedding] = LinearShape(table.num_embeddings, table.embedding_dim, transposed=True, plain=True)
    targets = {name: name for name in shapes}
    for group in find_experts(model):
        for name in peft_experts.adapted_matrices(group, config):
            place = f"{group.name}.lora.{name.rpartition('.')[2]}"
            shapes[place], targets[place] = stack_shape(group, model.get_parameter(name)), name
    for name, pair in sides.items():
        if (shape := shapes.get(name)) is None:
            remedy = "is this the base that it was trained on?"
            raise ModelError(f"there is no linear layer {name} in {type(model).__name__}", where=where, remedy=remedy)
        if set(pair) != {"A", "B"}:
            raise ModelError(f"of {name} only lora_{next(iter(pair))} is there", where=where)
        rank = pair["A"].shape[-2]
        if pair["A"].shape[-2:] != (rank, shape.inputs) or pair["B"].shape[-2:] != (shape.outputs, rank):
            what = f"the adapter of {name} is {list(pair['A'].shape)} and {list(pair['B'].shape)}"
            what += f", the layer takes {shape.inputs} and gives {shape.outputs}"
            raise ModelError(what, where=where, remedy="is this the base that it was trained on?")
    if config.targets != "all-linear":
        for name in shapes:
            if name not in sides and config.adapts(name):
                what = f"{CONFIG_FILE} says that {name} is adapted, but no key of the weights is for it"
                raise ModelError(what, where=where, remedy="the file was written incompletely, or under other names")
    if not sides:
        raise ModelError("no key of the weights is a LoRA matrix", where=where)
    share = config.dropout if dropout is None else dropout
    for name in sides if config.dora else ():
        if f"{name}{LENGTHS}.weight" not in weights:
            raise ModelError(f"of {name} lora_magnitude_vector is missing, which use_dora promises", where=where)
    way = (share, config.rslora, config.dora)
    return {
        targets[name]: LoraSpec(sides[name]["A"].shape[-2], _alpha(config, targets[name]), *way)
        for name in shapes
        if name in sides
    }


def _alpha(config: PeftConfig, name: str) -> float:
    """Of a linear layer, which PEFT may know by its weight, or of a weight of experts."""
    weight = f"{name}.weight"
    return config.alpha_of(weight if config.adapts_parameter(weight) else name)


@torch.no_grad()
def _fill(model: Any, config: PeftConfig, weights: dict[str, Tensor]) -> None:
    """Copy the values; what has no place is refused, unless it repeats what the base has anyway."""
    where = str(config.directory)
    settle_ties(model)
    tie_rows(model)
    trained = wholly_trained(model)
    if _ends_differ(model, weights):
        untie(model)
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if rowless := [name for name in rows_of(model) if f"{name}{ROWS}" not in weights]:
        raise ModelError(f"the rows of {rowless[0]} are missing, which {CONFIG_FILE} promises", where=where)
    missing = [name for name in _kept(model, trained) if name not in weights]
    if missing:
        raise ModelError(f"{missing[0]} is missing, which modules_to_save promises", where=where)
    for key, value in weights.items():
        name = key.replace(".base_layer.", ".")
        place = places.get(name)
        if place is None:
            raise ModelError(f"there is no place for {key} in {type(model).__name__}", where=where)
        if place.shape != value.shape:
            what = f"{key} is {list(value.shape)} and the model's is {list(place.shape)}"
            raise ModelError(what, where=where, remedy="was the vocabulary resized? Start from the resized model")
        ours = ".lora_" in name or is_adapter_weight(name) or any(name.startswith(f"{whole}.") for whole in trained)
        if ours:
            place.copy_(value)
        elif not torch.equal(place.cpu(), value.to(place.dtype)):
            remedy = "merge it into its base with PEFT and start from that model"
            what = f"{key} differs from the base and is not trained by this adapter"
            raise ModelError(what, where=where, remedy=remedy)


def _kept(model: nn.Module, trained: tuple[str, ...]) -> list[str]:
    return [f"{name}.{key}" for name in trained for key in model.get_submodule(name).state_dict()]


def _ends_differ(model: Any, weights: dict[str, Tensor]) -> bool:
    """Whether the files hold two ends of one tie, with different values."""
    tied = dict(model.all_tied_weights_keys)
    both = [(a, b) for a, b in tied.items() if a in weights and b in weights]
    return any(not torch.equal(weights[a], weights[b]) for a, b in both)
