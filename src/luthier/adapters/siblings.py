"""Adapted layers that share their input (q, k and v; gate and up) are computed together by the first that is called.

Which layers do is not read from names: in one small forward pass at set-up the layers of each parent are watched, and
those that get the very same tensor form a group. From then on the first computes all, and the others hand out what was
laid by for them if they are called with that same tensor, unchanged; otherwise they compute for themselves. So a wrong
guess costs time and never changes a number. A group never changes while training: activation checkpointing relies on
every forward pass keeping the same tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.gather import reshard

if TYPE_CHECKING:
    from luthier.adapters.layer import LoraLayer


class Siblings:
    """Adapted layers of one parent that share their input.

    Args:
        layers: in the order in which they are called.
    """

    def __init__(self, layers: list[LoraLayer]) -> None:
        self.layers = layers
        self._input: Tensor | None = None
        self._version = -1
        self._waiting: dict[LoraLayer, Tensor] = {}
        for layer in layers:
            layer.lora_siblings = self

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "_input": None, "_version": -1, "_waiting": {}}  # a copy starts with empty hands

    def part(self) -> None:
        """Let every layer compute for itself from now on."""
        for layer in self.layers:
            layer.lora_siblings = None

    def output(self, layer: LoraLayer, x: Tensor) -> Tensor:
        """What `layer` makes of x, computed now or when the first of its group was called.

        Args:
            layer: one of the siblings, without dropout, gradients being recorded.
            x: [..., inputs].

        Returns:
            [..., outputs].
        """
        if layer in self._waiting and self._input is x and self._version == x._version:
            y = self._waiting.pop(layer)
            if not self._waiting:
                self._input = None
            return y
        self._input, self._waiting = None, {}
        if layer is not self.layers[0]:
            return layer.fused(x, None, [layer])[0]
        outputs = layer.fused(x, None, self.layers)
        self._input, self._version = x, x._version
        self._waiting = dict(zip(self.layers[1:], outputs[1:], strict=True))
        return outputs[0]


@torch.no_grad()
def find_siblings(model: Any, run: Callable[[], object] | None = None) -> list[Siblings]:
    """Watch a model for two tokens, without gradients, and group the adapted layers that share their input.

    Args:
        model: a Transformers model with adapters in place and nothing on meta; its random streams are not touched.
        run: runs its layers; the model's own forward on two tokens when left out.

    Returns:
        the groups; each layer of theirs knows its own.

    Raises:
        ConfigError: a module runs without calling an adapted layer of its, since it reads the layer's weight itself
            (Mamba's dt_proj): the adapter would do nothing, until merging it changed the model.
    """
    from luthier.adapters.layer import adapted_layers

    layers = dict(adapted_layers(model))
    for layer in layers.values():
        if layer.lora_siblings is not None:
            layer.lora_siblings.part()
    calls = _watch(model, layers, run)
    unseen = describe(model).eyes  # the two tokens are text
    for name in _passed_by(layers, calls):
        if name in unseen:
            continue
        parent = type(model.get_submodule(name.rpartition(".")[0])).__name__
        what = f"{parent} reads the weight of {name} without calling the layer"
        raise ConfigError(
            f"{what}, so an adapter beside it would do nothing",
            where="adapter.target",
            remedy=f"name the layers to adapt, without {name.rpartition('.')[2]}",
        )
    found = []
    families: dict[str, list[tuple[Tensor, list[LoraLayer]]]] = defaultdict(list)
    for name, inputs in calls.items():
        if name not in layers or len(inputs) != 1:
            continue
        groups = families[name.rpartition(".")[0]]
        group = next((group for x, group in groups if x is inputs[0] and _alike(group[0], layers[name])), None)
        if group is None:
            groups.append((inputs[0], [layers[name]]))
        else:
            group.append(layers[name])
    for groups in families.values():
        found += [Siblings(group) for _, group in groups if len(group) > 1]
    return found


@torch.no_grad()
def passed_by(model: Any, names: Iterable[str]) -> list[str]:
    """Linear layers whose module runs without calling them (Mamba's dt_proj): an adapter would do nothing there.

    Args:
        model: a Transformers model with nothing on meta, adapters in place or not.
        names: full names of linear layers.
    """
    layers = {name: model.get_submodule(name) for name in names}
    return _passed_by(layers, _watch(model, layers, None))


def _passed_by(names: Iterable[str], calls: Mapping[str, list[Any]]) -> list[str]:
    return [name for name in names if name not in calls and name.rpartition(".")[0] in calls]


def _watch(model: Any, layers: Mapping[str, nn.Module], run: Callable[[], object] | None) -> dict[str, list[Any]]:
    """Name -> first arguments, for every call of these layers and of their parents, in the order of first calls."""
    calls: dict[str, list[Any]] = defaultdict(list)
    watched = dict.fromkeys([*layers, *(name.rpartition(".")[0] for name in layers)])
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: calls[name].append(inputs[0] if inputs else None)
        )
        for name in watched
    ]
    device = next(model.parameters()).device
    training = model.training
    model.train()  # what is called while training is what counts; some models take another way then
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if run is None:
                model(input_ids=torch.tensor([[0, 1]], device=device), use_cache=False)
            else:
                run()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
        reshard(model)  # no backward pass comes to give the root's gathered weights back
    return calls


def _alike(one: LoraLayer, other: LoraLayer) -> bool:
    """Whether one product may compute two layers."""
    return (
        one.lora_shape.inputs == other.lora_shape.inputs
        and one.lora_shape.transposed == other.lora_shape.transposed
        and one.lora_spec.scale == other.lora_spec.scale
        and one.lora_spec.dora == other.lora_spec.dora
        and one.weight.dtype == other.weight.dtype
        and one.lora_A.weight.dtype == other.lora_A.weight.dtype
    )
