"""Sequence parallelism, beside tensor parallelism: between its blocks each rank holds a slice of the positions only.

Norms, residual sums and what recomputation keeps are then dealt to the ranks too. A block (attention, feed-forward,
experts) still sees all positions. Where all that reads its input is cut, and all that it gives comes out of summed
projections, the sums of tensor parallelism turn into pairs of a gather before and a reduce-scatter behind, which move
as many bytes; any other block runs as it does without: put together before, cut behind.

    Korthikanti et al. (2022), Reducing Activation Recomputation in Large Transformer Models, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from luthier.hf.linear import linear_shape
from luthier.parallel.styles import ADAPTER_PARTS, PARTIAL


@dataclass(slots=True)
class Slices:
    """Which modules do what.

    Attributes:
        opens, closes: layers where the positions are cut, and put together again.
        cut: blocks whose input is gathered for work that each rank does a part of.
        whole: blocks that all ranks run alike.
        entered: modules within cut blocks, whose input has been gathered and whose sums are to be cut again.
        local: modules of the layers that see the own positions only, so that their weights' gradients are parts.
    """

    opens: set[str] = field(default_factory=set)
    closes: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)


def sequence_plan(model: Any, runs: Iterable[Sequence[str]], styles: Mapping[str, str]) -> Slices | str:
    """How the layers of a model go with slices of the positions, or as a clause why they do not.

    Args:
        model: before it is cut.
        runs: names of the layers that this rank has, those of each stage together.
        styles: of the tensor-parallel plan.
    """
    found = Slices()
    runs = [list(run) for run in runs if run]
    for run in runs:
        found.opens.add(run[0])
        found.closes.add(run[-1])
    for layer in itertools.chain.from_iterable(runs):
        module = model.get_submodule(layer)
        found.local.add(layer)
        for child, block in module.named_children():
            name = f"{layer}.{child}"
            if _is_local(block):
                found.local |= {name, *(f"{name}.{inner}" for inner, _ in block.named_modules() if inner)}
            elif linear_shape(block) is not None or isinstance(block, nn.ModuleList | nn.ModuleDict):
                return f"{child} stands in the layers themselves, where positions may be mixed"
            elif _is_pure(name, block, styles):
                found.cut.add(name)
                found.entered |= {f"{name}.{inner}" for inner, _ in block.named_modules() if inner}
            else:
                found.whole.add(name)
    return found


def _is_local(module: nn.Module) -> bool:
    """Whether a module of a layer treats each position by itself: norms, and what has no weights."""
    return "Norm" in type(module).__name__ or not any(True for _ in module.parameters())


def _is_pure(name: str, block: nn.Module, styles: Mapping[str, str]) -> bool:
    """Whether a block's input is read by cut projections alone, and its output made by summed ones."""
    kinds = set()
    for inner, module in block.named_modules(prefix=name):
        leaf, parent = inner.rpartition(".")[2], inner.rpartition(".")[0]
        if leaf in ADAPTER_PARTS and parent in styles:
            continue
        style = styles.get(inner)
        for key, _ in module.named_parameters(recurse=False):
            kinds.add(style or styles.get(f"{inner}.{key}", ""))
    return "rowwise" in kinds and kinds <= {"colwise", "colwise_sections", "rowwise", *PARTIAL - {"sequence_parallel"}}
