"""Adapters folded into their base weights: added in float32, rounded once to the base's dtype.

Adding in bfloat16 would round the product, the scaled product and the sum. What the one rounding costs is measured and
said, since in bfloat16 a small update can vanish in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luthier.adapters.layer import LoraLayer, adapted_layers, detach
from luthier.adapters.structure import untie
from luthier.hf.anatomy import describe

_ROWS = 4096
"""Rows of a weight that are added at a time: what is wider than the weight stays small."""


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
    worst, where, count = 0.0, "", 0
    for name, layer in list(adapted_layers(model)):
        merged, deviation = merged_weight(layer)
        layer.weight.data.copy_(merged)
        detach(layer)
        count += 1
        if deviation > worst or not where:
            worst, where = deviation, name
    return MergeReport(count, worst, where, untied)


class MergedState:
    """The state of the model that `merge` would make, one tensor at a time, while this one goes on training.

    Iterating yields (name, tensor): names are those of the base, tied names only once (the owner's), tensors the
    model's own except for adapted weights, each of which is made when its turn comes and held by nobody here. After
    it, `report` says what the rounding cost.

    Attributes:
        tied: whether head and embedding are still one in what is yielded; what an exported config must say.
        report: None until the last tensor has been taken.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parted = _must_part(model)
        self.tied = describe(model).tied and not self._parted
        self.report: MergeReport | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        model: nn.Module = self._model
        layers = dict(adapted_layers(model))
        anatomy = describe(self._model)
        skipped = set(self._model.all_tied_weights_keys)
        if self._parted:
            skipped -= {f"{anatomy.head}.weight", f"{anatomy.embedding}.weight"}
        worst, where = 0.0, ""
        for key, value in model.state_dict().items():
            owner, _, last = key.rpartition(".")
            if owner.endswith((".lora_A", ".lora_B")) or key in skipped:
                continue
            if owner in layers and last == "weight":
                value, deviation = merged_weight(layers[owner])
                if deviation > worst or not where:
                    worst, where = deviation, owner
            yield key, value
        self.report = MergeReport(len(layers), worst, where, self._parted)


def _must_part(model: Any) -> bool:
    """Whether an adapter beside a tied head would change the embedding if it were folded in."""
    anatomy = describe(model)
    if not anatomy.tied or anatomy.head is None:
        return False
    return isinstance(model.get_submodule(anatomy.head), LoraLayer)


class Merging:
    """Merges weights on their way into an export, one at a time, while the model goes on training.

    Call it with a weight's full name and value: an adapted weight comes back merged, an adapter's own weight as None,
    everything else as it is. Afterwards `report` says what the rounding cost.
    """

    def __init__(self, model: Any) -> None:
        self._layers = dict(adapted_layers(model))
        self.report = MergeReport(0, 0.0, "", _must_part(model))

    def __call__(self, name: str, value: Tensor) -> Tensor | None:
        owner, _, last = name.rpartition(".")
        if owner.endswith((".lora_A", ".lora_B")):
            return None
        if owner not in self._layers or last != "weight":
            return value
        merged, deviation = merged_weight(self._layers[owner])
        worst = self.report
        where, most = (owner, deviation) if deviation > worst.deviation or not worst.where else (worst.where, worst.deviation)
        self.report = MergeReport(worst.layers + 1, most, where, worst.untied)
        return merged
