"""Adapters folded into their base weights: added in float32, rounded once to the base's dtype.

Adding in bfloat16 would round the product, the scaled product and the sum. What the one rounding costs is measured and
said, since in bfloat16 a small update can vanish in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luthier.adapters.layer import LoraLayer, adapted_layers, detach, is_adapter_weight
from luthier.adapters.structure import untie
from luthier.hf.anatomy import describe

_ROWS = 4096
"""Rows of a weight that are added at a time: what is wider than the weight stays small."""
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging did; `str()` says it in a line.

    Attributes:
        layers: how many adapters were folded in.
        deviation: the largest |merged - exact| of a weight, as a share of its largest |exact|.
        where: full name of the layer with that deviation; empty without adapters.
        untied: the head has a weight of its own from now on, apart from the embedding's.
    """

    layers: int
    deviation: float
    where: str
    untied: bool

    def __str__(self) -> str:
        untied = "; the head is no longer tied to the embedding" if self.untied else ""
        if not self.layers:
            return f"no adapters to merge{untied}"
        largest = f"{self.deviation:.2g} ({self.where})"
        return f"merged {self.layers} adapters, largest deviation by rounding {largest}{untied}"


def merged_weight(layer: LoraLayer) -> tuple[Tensor, float]:
    """The weight that alone does what a layer and its adapter do.

    Args:
        layer: an adapted layer.

    Returns:
        a new tensor of the base weight's shape, dtype and device, and its deviation (`MergeReport.deviation`).
    """
    weight = layer.weight.detach()
    down, up = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    exactly = torch.float64 if weight.dtype.itemsize >= 4 else torch.float32
    left, right = (down.t(), up.t()) if layer.lora_shape.transposed else (up, down)
    merged = torch.empty_like(weight)
    error, largest = weight.new_zeros((), dtype=exactly), weight.new_zeros((), dtype=exactly)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        total = _sum(weight[rows], left[rows], right, layer.lora_spec.scale, wide)
        merged[rows] = total
        exact = total if exactly == wide else _sum(weight[rows], left[rows], right, layer.lora_spec.scale, exactly)
        error = torch.maximum(error, (merged[rows].to(exactly) - exact).abs().max())
        largest = torch.maximum(largest, exact.abs().max())
    return merged, (error / largest).item() if largest > 0 else 0.0


def _sum(weight: Tensor, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + scale * (left.to(dtype) @ right.to(dtype))


def merge(model: Any) -> MergeReport:
    """Fold every adapter into its base weight and remove it; the classes of the layers are the base's again.

    A head that carries an adapter and shares the embedding's weight gets a weight of its own, and the model's config
    says so: the embedding does not change.

    Args:
        model: a Transformers model with adapters in place.

    Returns:
        how many, and what the rounding cost.
    """
    untied = _must_part(model)
    if untied:
        untie(model)
    deviations = {}
    for name, layer in list(adapted_layers(model)):
        merged, deviations[name] = merged_weight(layer)
        layer.weight.data.copy_(merged)
        detach(layer)
    return _report(deviations, untied)


class Merging:
    """What `merge` would make of each weight, while the model goes on training: a `transform` of `hf.save.save_model`.

    One merged weight at a time is made and handed out, and none is kept.

    Args:
        model: a Transformers model, with adapters in place or without.

    Attributes:
        untied: the head comes out with a weight of its own, and the exported config must say so.
    """

    def __init__(self, model: Any) -> None:
        self.untied = _must_part(model)
        self._layers = {_WRAPPERS.sub("", name): layer for name, layer in adapted_layers(model)}
        self._deviations: dict[str, float] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor | None:
        """The weight to write under a name of the model's state.

        Args:
            name: full name of a parameter or buffer.
            value: what the model holds there.

        Returns:
            a new tensor for an adapted layer's weight, None for an adapter's own, otherwise `value` itself.
        """
        if is_adapter_weight(name):
            return None
        owner, _, last = name.rpartition(".")
        if last != "weight" or owner not in self._layers:
            return value
        merged, self._deviations[owner] = merged_weight(self._layers[owner])
        return merged

    @property
    def report(self) -> MergeReport:
        """What the rounding of all weights handed out so far cost."""
        return _report(self._deviations, self.untied)


def _report(deviations: dict[str, float], untied: bool) -> MergeReport:
    worst = max(deviations, key=lambda name: deviations[name], default="")
    return MergeReport(len(deviations), deviations.get(worst, 0.0), worst, untied)


def _must_part(model: Any) -> bool:
    """Whether an adapter beside a tied head would change the embedding if it were folded in."""
    anatomy = describe(model)
    if not anatomy.tied or anatomy.head is None:
        return False
    return isinstance(model.get_submodule(anatomy.head), LoraLayer)
