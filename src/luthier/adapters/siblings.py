"""Adapted layers that share their input (q, k and v; gate and up) are computed together by the first that is called.

Which layers do is not read from names: in one small forward pass at set-up the layers of each parent are watched, and
those that get the very same tensor form a group. From then on the first computes all, and the others hand out what was
laid by for them if they are called with that same tensor, unchanged; otherwise they compute for themselves. So a wrong
guess costs time and never changes a number. A group never changes while training: activation checkpointing relies on
every forward pass keeping the same tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
def find_siblings(model: Any) -> list[Siblings]:
    """Watch a model for two tokens, without gradients, and group the adapted layers that share their input.

    Args:
        model: a Transformers model with adapters in place and nothing on meta.

    Returns:
        the groups; each layer of theirs knows its own.
    """
    from luthier.adapters.layer import adapted_layers

    layers = dict(adapted_layers(model))
    calls: dict[str, list[tuple[LoraLayer, Tensor]]] = defaultdict(list)

    def watch(parent: str) -> Any:
        def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs:
                calls[parent].append((layer, inputs[0]))  # type: ignore[arg-type]

        return note

    for layer in layers.values():
        if layer.lora_siblings is not None:
            layer.lora_siblings.part()
    hooks = [layer.register_forward_pre_hook(watch(name.rpartition(".")[0])) for name, layer in layers.items()]
    training = model.training
    model.eval()
    try:
        model(input_ids=torch.tensor([[0, 1]], device=next(iter(layers.values())).weight.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    found = []
    for family in calls.values():
        groups: list[tuple[Tensor, list[LoraLayer]]] = []
        for layer, x in family:
            group = next((group for seen, group in groups if seen is x and _alike(group[0], layer)), None)
            groups.append((x, [layer])) if group is None else group.append(layer)
        once = [layer for layer, _ in family]
        found += [Siblings(group) for _, group in groups if len(group) > 1 and all(once.count(e) == 1 for e in group)]
    return found


def _alike(one: LoraLayer, other: LoraLayer) -> bool:
    """Whether one product may compute two layers."""
    return (
        one.lora_shape.inputs == other.lora_shape.inputs
        and one.lora_shape.transposed == other.lora_shape.transposed
        and one.lora_spec.scale == other.lora_spec.scale
        and one.weight.dtype == other.weight.dtype
        and one.lora_A.weight.dtype == other.lora_A.weight.dtype
    )
