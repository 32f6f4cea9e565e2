"""Random weights by the model's own initialisation, the same on every layout.

Each module draws from a stream of its own, which depends on the seed and the module's name alone. What is sharded is
drawn whole, a layer at a time, and cut: so a model in shards or stages, or with adapters in it, starts from the same
bits as the whole one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import initialization as init

from luthier.hf.shards import fill, own_part


def initialise(model: PreTrainedModel, seed: int) -> None:
    """The model's own initialisation of everything that no checkpoint gave.

    Args:
        model: nothing on meta.
        seed: of the run.
    """
    custom = model.is_custom_code()
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # torch.manual_seed seeds every device there is: before CUDA is up it keeps each call's stack for later, as text,
    # and that took most of the time to make a small model. A tied head may still be on meta.
    on_cpu = all(p.device.type in ("cpu", "meta") for p in model.parameters())
    seed_all = torch.default_generator.manual_seed if on_cpu else torch.manual_seed

    def one(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        seed_all(int.from_bytes(digest[:8], "little") >> 1)
        owner._initialize_weights(module, custom)

    def walk(module: nn.Module, name: str, owner: PreTrainedModel, within: bool, listed: bool) -> None:
        # A layer, or a part that holds no layers, is drawn whole with all that is in it, since a module's
        # initialisation may reach into its children.
        unit = not within and (listed or not any(isinstance(inner, nn.ModuleList) for inner in module.modules()))
        with _whole(module.modules() if unit else [] if within else [module]):
            for child_name, child in module.named_children():
                inner = child if isinstance(child, PreTrainedModel) else owner
                child_name = f"{name}.{child_name}" if name else child_name
                walk(child, child_name, inner, within or unit, isinstance(module, nn.ModuleList))
            one(module, name, owner)

    with torch.no_grad(), torch.random.fork_rng(devices=sorted(i for i in devices if i is not None)):
        init.guard_torch_init_functions()(walk)(model, "", model, False, False)
        _reset_as_reading_does(model)


def _reset_as_reading_does(model: PreTrainedModel) -> None:
    """Of a whole weight the class has done it already."""
    row, weight = row_reset_on_reading(model), getattr(model.get_input_embeddings(), "weight", None)
    if row is not None and isinstance(weight, DTensor):
        kept = torch.ones(weight.shape[0], 1, dtype=weight.dtype, device=weight.device)
        kept[row] = 0
        weight.to_local().mul_(own_part(weight, kept.expand(weight.shape)))


def row_reset_on_reading(model: PreTrainedModel) -> int | None:
    """The token whose embedding the model's class sets to 0 whenever Transformers reads a checkpoint, whatever that
    holds; None if there is none.

    Initialisation leaves alone what is marked as read, but a class that writes to `weight.data[padding_idx]` goes past
    the mark.
    """
    row = getattr(model.get_input_embeddings(), "padding_idx", None)
    if row is None:
        return None
    read = nn.Embedding(row + 1, 1, padding_idx=row)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        read.weight.fill_(1.0)
        read.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        init.guard_torch_init_functions()(model._init_weights)(read)
    return row if float(read.weight[row].detach().sum()) == 0.0 else None


@contextmanager
def _whole(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put whole tensors in the place of sharded ones; afterwards each rank keeps its part of those that were drawn.

    What loading has filled is not drawn again, but code that draws may take its shape, and write to parts of that.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    drawn: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in drawn:
                like: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
                filled = getattr(parameter, "_is_hf_initialized", False)
                whole = (
                    torch.zeros((), **like).expand(parameter.shape) if filled else torch.empty(parameter.shape, **like)
                )
                drawn[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                drawn[id(parameter)]._is_hf_initialized = filled
            replaced.append((module, name, parameter, drawn[id(parameter)]))
    for module, name, _, whole in replaced:
        module._parameters[name] = whole
    try:
        yield
    finally:
        for module, name, parameter, whole in replaced:
            module._parameters[name] = parameter
            if not getattr(parameter, "_is_hf_initialized", False):
                fill(parameter, whole)
