"""Adapted layers that share their input are computed together by the first of them that is called.

Which layers do is not read from names: in the first forward pass the layers of one parent are watched, and those that
got the very same tensor form a group. From then on the first computes all, and the others hand out what was laid by for
them if they are called with that same tensor, unchanged; otherwise they compute for themselves. So a wrong guess costs
time and never changes a number, and a group whose outputs are left over is given up for good.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from luthier.adapters.layer import LoraLayer


class Siblings:
    """The adapted layers of one parent that could share an input, and what has been found out about them."""

    def __init__(self) -> None:
        self._groups: dict[LoraLayer, list[LoraLayer]] | None = None
        self._watched: dict[LoraLayer, tuple[weakref.ref[Tensor], list[LoraLayer]]] = {}
        self._input: Tensor | None = None
        self._version = -1
        self._waiting: dict[LoraLayer, Tensor] = {}

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()  # a copy of the model watches for itself

    def forget(self) -> None:
        """Start over: the layers have changed."""
        self._groups, self._watched = None, {}
        self._input, self._waiting = None, {}

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
        if self._waiting:
            self._input, self._waiting = None, {}
            self._groups = {}  # the guess was wrong
        if self._groups is None:
            self._watch(layer, x)
        group = (self._groups or {}).get(layer, [layer])
        outputs = layer.fused(x, None, group)
        if len(group) > 1:
            self._input, self._version = x, x._version
            self._waiting = dict(zip(group[1:], outputs[1:], strict=True))
        return outputs[0]

    def _watch(self, layer: LoraLayer, x: Tensor) -> None:
        """Note who was called with what; a layer's second call ends the watching."""
        if any(layer in group for _, group in self._watched.values()):
            self._groups = {group[0]: group for _, group in self._watched.values()}
            self._watched = {}
            return
        for seen, group in self._watched.values():
            if seen() is x and alike(group[0], layer):
                group.append(layer)
                return
        self._watched[layer] = (weakref.ref(x), [layer])


def alike(one: LoraLayer, other: LoraLayer) -> bool:
    """Whether one product may compute two layers: same inputs, scale and dtypes, and no hooks that might intervene."""
    return (
        one.lora_shape.inputs == other.lora_shape.inputs
        and one.lora_shape.transposed == other.lora_shape.transposed
        and one.lora_spec.scale == other.lora_spec.scale
        and one.weight.dtype == other.weight.dtype
        and one.lora_A.weight.dtype == other.lora_A.weight.dtype
        and not other._forward_pre_hooks
        and not other._forward_hooks
    )
