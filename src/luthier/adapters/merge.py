"""Adapters folded into their base weights: added in float32, rounded once to the base's dtype.

Adding in bfloat16 would round the product, the scaled product and the sum. What the one rounding costs is measured and
said, since in bfloat16 a small update can vanish in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luthier.adapters.dora import factor, row_norms
from luthier.adapters.embedding import LoraEmbedding, detach_embedding
from luthier.adapters.experts import Adapted, LoraExperts, adapted, detach_experts, weight_names
from luthier.adapters.layer import LoraLayer, detach, is_adapter_weight
from luthier.adapters.prompt import learned
from luthier.adapters.rows import SUFFIX as ROWS
from luthier.adapters.rows import folded, merge_rows, rows_of
from luthier.adapters.structure import untie
from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.nf4 import Nf4Weight, dense
from luthier.hf.together import Group, exchange

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
        layer: an adapted layer, whole.

    Returns:
        a new tensor of the base weight's shape, dtype and device, and its deviation (`MergeReport.deviation`).
    """
    names = [name.removeprefix(".") for name in weight_names("", layer)]
    return _merged(layer, *(dense(layer.get_parameter(name).detach()) for name in names))


def _merged(
    layer: Adapted, weight: Tensor, down: Tensor, up: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, float]:
    """The same of whole matrices that were gathered from where a layer's parts lie."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    exactly = torch.float64 if weight.dtype.itemsize >= 4 else torch.float32
    if isinstance(layer, LoraLayer) and layer.lora_B.mask is not None:
        up = up * layer.lora_B.mask
    scale, transposed = layer.lora_spec.scale, layer.lora_shape.transposed
    grown = None  # of a row; transposed: of a column
    if lengths is not None:
        grown = factor(lengths, row_norms(weight, down, up, scale, transposed))
        grown = grown[None] if transposed else grown[:, None]
    left, right = (down.mT, up.mT) if transposed else (up, down)
    merged = torch.empty_like(weight)
    error, largest = weight.new_zeros((), dtype=exactly), weight.new_zeros((), dtype=exactly)
    stacked = weight.dim() == 3  # a matrix an expert, taken one at a time
    for start in range(0, len(weight), 1 if stacked else _ROWS):
        rows: Any = start if stacked else slice(start, start + _ROWS)
        across = right[rows] if stacked else right
        by = grown if grown is None or transposed else grown[rows]
        total = _sum(weight[rows], left[rows], across, scale, wide, by)
        merged[rows] = total
        exact = total if exactly == wide else _sum(weight[rows], left[rows], across, scale, exactly, by)
        error = torch.maximum(error, (merged[rows].to(exactly) - exact).abs().max())
        largest = torch.maximum(largest, exact.abs().max())
    return merged, (error / largest).item() if largest > 0 else 0.0


def _sum(weight: Tensor, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype, grown: Tensor | None) -> Tensor:
    total = weight.to(dtype) + scale * (left.to(dtype) @ right.to(dtype))
    return total if grown is None else total * grown


def merge(model: Any) -> MergeReport:
    """Fold every adapter into its base weight and remove it; the classes of the layers are the base's again.

    Where head and embedding share a weight and one carries an adapter, each gets a weight of its own, and the model's
    config says so: the other end does not change. What was quantised and adapted is a plain weight afterwards.

    Args:
        model: a Transformers model with adapters in place.

    Returns:
        how many, and what the rounding cost.
    """
    require_mergeable(model)
    untied = _must_part(model)
    if untied:
        untie(model)
    deviations = {}
    for name, layer in list(adapted(model)):
        places = [model.get_parameter(key) for key in weight_names(name, layer)]
        merged, deviations[name] = _merged(layer, *(dense(place.detach()) for place in places))
        if isinstance(layer, LoraLayer) and isinstance(places[0], Nf4Weight):
            layer.weight = nn.Parameter(merged, requires_grad=False)
        else:
            places[0].data.copy_(merged)
        if isinstance(layer, LoraLayer):
            detach(layer)
        elif isinstance(layer, LoraEmbedding):
            detach_embedding(layer)
    for module in [module for module in model.modules() if isinstance(module, LoraExperts)]:
        detach_experts(module)
    merge_rows(model)
    return _report(deviations, untied)


def require_mergeable(model: Any) -> None:
    """Refuse to fold in what stands in the place of text.

    Raises:
        ConfigError: it cannot be in any weight.
    """
    if learned(model):
        what = "virtual tokens, prefixes and prompts stand in the place of text and cannot be merged into weights"
        raise ConfigError(what, where="--merge", remedy="export the adapter's files (--adapter)")


class Merging:
    """What `merge` would make of each weight, while the model goes on training: a `Transform` of `hf.save.save_model`.

    One merged weight at a time is made and handed out, and none is kept.

    Args:
        model: a Transformers model or what this rank holds of it, with adapters in place or without.
    """

    def __init__(self, model: Any) -> None:
        require_mergeable(model)
        self._layers: dict[str, tuple[Adapted, tuple[str, ...]]] = {}
        for name, layer in adapted(model):
            names = weight_names(_WRAPPERS.sub("", name), layer)
            self._layers[names[0]] = layer, names
        self._rows = {f"{_WRAPPERS.sub('', name)}.weight": own for name, own in rows_of(model).items()}
        self._tied = {_WRAPPERS.sub("", name) for name in _tied_heads(model)}
        self._deviations: dict[str, float] = {}

    def sources(self, name: str) -> Sequence[str] | None:
        """The weights that one in the export is made of.

        Args:
            name: full name of a parameter or buffer.

        Returns:
            an adapted layer's weight with what adapts it, None for one of these, otherwise the weight alone.
        """
        if is_adapter_weight(name):
            return None
        if name in self._rows:
            return name, f"{name.removesuffix('.weight')}{ROWS}"
        return self._layers[name][1] if name in self._layers else (name,)

    def __call__(self, name: str, sources: Sequence[Tensor]) -> Tensor:
        """The merged weight of an adapted layer.

        Args:
            name: full name of the weight.
            sources: it and what adapts it, whole.

        Returns:
            a new tensor.
        """
        if name in self._rows:
            return folded(self._rows[name], *sources)
        merged, self._deviations[name.removesuffix(".weight")] = _merged(self._layers[name][0], *sources)
        return merged

    def shape(self, name: str, own: torch.Size) -> torch.Size:
        """The shape of the weight in the export: a table of tokens may grow."""
        extra = self._rows[name].extra if name in self._rows else 0
        return torch.Size((own[0] + extra, *own[1:])) if extra else own

    def keeps_tie(self, twin: str, owner: str) -> bool:
        """Whether head and embedding stay one matrix: rows of tokens are both ends', an adapter is one's."""
        return not self._tied & {name.removesuffix(".weight") for name in (twin, owner)}

    def report(self, group: Group | None = None) -> MergeReport:
        """What the rounding of all weights handed out so far cost.

        Args:
            group: ranks that have each handed out some, all of which call this.
        """
        deviations: dict[str, float] = {}
        tied: set[str] = set()
        for found, heads in exchange((self._deviations, self._tied), group):
            deviations |= found
            tied |= heads
        return _report(deviations, bool(tied & deviations.keys()))


def _report(deviations: dict[str, float], untied: bool) -> MergeReport:
    worst = max(deviations, key=lambda name: deviations[name], default="")
    return MergeReport(len(deviations), deviations.get(worst, 0.0), worst, untied)


def _must_part(model: Any) -> bool:
    """Whether an adapter beside one of two tied ends would change the other if it were folded in."""
    return bool(_tied_heads(model))


def _tied_heads(model: Any) -> list[str]:
    """Names of head and embedding that carry an adapter, where the two share a weight."""
    anatomy = describe(model)
    if not anatomy.tied or anatomy.head is None:
        return []
    ends = {name: model.get_submodule(name) for name in (anatomy.head, anatomy.embedding)}
    return [name for name, module in ends.items() if isinstance(module, LoraLayer | LoraEmbedding)]
