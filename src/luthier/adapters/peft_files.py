"""Adapters in PEFT's files, both ways: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from luthier.adapters.layer import LoraSpec, adapted_layers
from luthier.adapters.peft_config import CONFIG_FILE, WEIGHT_FILES, PeftConfig, peft_config_json, read_peft_config
from luthier.adapters.structure import attach_all, both_ends_trained, freeze, settle_ties, untie, wholly_trained
from luthier.errors import ModelError
from luthier.hf.anatomy import describe
from luthier.hf.linear import linear_shape

PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def save_peft(model: Any, directory: str | Path, *, base_model: str | None = None, revision: str | None = None) -> Path:
    """Write a model's adapters, and the modules trained whole, as PEFT does.

    Args:
        model: adapters in place.
        directory: made if it is not there. A reader never finds a half-written adapter in it: everything is written
            aside and renamed, the config last.
        base_model: name or path of the base, for whoever loads the files.
        revision: its revision on the Hub.

    Returns:
        the directory.

    Raises:
        ModelError: the model carries no adapters.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        raise ModelError("there are no adapters to save", remedy="export the whole model instead")
    trained = wholly_trained(model)
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A.weight
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B.weight
    for name in trained:
        for key, value in model.get_submodule(name).state_dict().items():
            tensors[f"{PREFIX}{name}.{key}"] = value
    ready = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
    text = peft_config_json(
        ranks={name: layer.lora_spec.rank for name, layer in layers.items()},
        alphas={name: layer.lora_spec.alpha for name, layer in layers.items()},
        dropout=max(layer.lora_spec.dropout for layer in layers.values()),
        rslora=any(layer.lora_spec.rslora for layer in layers.values()),
        modules=trained,
        names=[name for name, _ in model.named_modules() if not name.endswith((".lora_A", ".lora_B"))],
        ties=both_ends_trained(model, describe(model)),
        transposed=any(layer.lora_shape.transposed for layer in layers.values()),
        base_model=base_model,
        revision=revision,
    )
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    for stale in (CONFIG_FILE, WEIGHT_FILES[1]):
        (target / stale).unlink(missing_ok=True)
    _write(target / WEIGHT_FILES[0], lambda path: save_file(ready, path, metadata={"format": "pt"}))
    _write(target / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))
    return target


def _write(path: Path, write: Callable[[Path], object]) -> None:
    aside = path.with_name(f".{path.name}.aside")
    write(aside)
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
    weights = _read_weights(config)
    trained = _saved_whole(model, config)
    specs = _specs(model, config, weights, dropout)
    present = {name: layer.lora_spec.rank for name, layer in adapted_layers(model)}
    if not present:
        attach_all(model, specs, trained, dtype)
    elif present != {name: spec.rank for name, spec in specs.items()}:
        raise ModelError("the model carries other adapters than these files hold", where=str(config.directory))
    if not any(parameter.is_meta for parameter in model.parameters()):
        _fill(model, config, weights)
    freeze(model)


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
    file = next((config.directory / name for name in WEIGHT_FILES if (config.directory / name).is_file()), None)
    if file is None:
        raise ModelError(f"there is no {WEIGHT_FILES[0]}", where=str(config.directory), remedy="fetch it again")
    try:
        if file.suffix == ".safetensors":
            raw = load_file(file)
        else:
            raw = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        what = "it is damaged, or holds more than tensors"
        raise ModelError(what, where=str(file), remedy="fetch it again") from error
    return {_WRAPPERS.sub("", key).removeprefix(PREFIX): value for key, value in raw.items()}


def _specs(
    model: nn.Module, config: PeftConfig, weights: dict[str, Tensor], dropout: float | None
) -> dict[str, LoraSpec]:
    """How each layer is adapted; the tensors say which and of what rank, and the config must agree."""
    where = str(config.directory)
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if found := _MATRIX.fullmatch(key):
            sides.setdefault(found["layer"], {})[found["side"]] = value
    shapes = {name: shape for name, module in model.named_modules() if (shape := linear_shape(module))}
    for name, pair in sides.items():
        if (shape := shapes.get(name)) is None:
            remedy = "is this the base that it was trained on?"
            raise ModelError(f"there is no linear layer {name} in {type(model).__name__}", where=where, remedy=remedy)
        if set(pair) != {"A", "B"}:
            raise ModelError(f"of {name} only lora_{next(iter(pair))} is there", where=where)
        rank = pair["A"].shape[0]
        if pair["A"].shape != (rank, shape.inputs) or pair["B"].shape != (shape.outputs, rank):
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
    return {
        name: LoraSpec(sides[name]["A"].shape[0], config.alpha_of(name), share, config.rslora)
        for name in shapes
        if name in sides
    }


@torch.no_grad()
def _fill(model: Any, config: PeftConfig, weights: dict[str, Tensor]) -> None:
    """Copy the values; what has no place is refused, unless it repeats what the base has anyway."""
    where = str(config.directory)
    settle_ties(model)
    trained = wholly_trained(model)
    _part_what_differs(model, weights)
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
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
        ours = ".lora_A." in name or ".lora_B." in name or any(name.startswith(f"{whole}.") for whole in trained)
        if ours:
            place.copy_(value)
        elif not torch.equal(place.cpu(), value.to(place.dtype)):
            remedy = "merge it into its base with PEFT and start from that model"
            what = f"{key} differs from the base and is not trained by this adapter"
            raise ModelError(what, where=where, remedy=remedy)


def _kept(model: nn.Module, trained: tuple[str, ...]) -> list[str]:
    return [f"{name}.{key}" for name in trained for key in model.get_submodule(name).state_dict()]


def _part_what_differs(model: Any, weights: dict[str, Tensor]) -> None:
    """Untie what the files hold twice with different values."""
    for target, source in dict(model.all_tied_weights_keys).items():
        if target in weights and source in weights and not torch.equal(weights[target], weights[source]):
            untie(model)
