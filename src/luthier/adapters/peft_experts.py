"""Adapters of fused experts in PEFT's files, where they are matrices and not stacks of them.

PEFT (`target_parameters`) wraps the module once for each adapted weight, so the first lies innermost; and it lays A as
[experts x rank, inputs] and B as [outputs, rank x experts], the experts running fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from luthier.adapters.peft_config import PeftConfig
from luthier.errors import ModelError
from luthier.hf.experts import Experts, find_experts
from luthier.hf.linear import linear_shape

_TAKEN = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}
"""Last parts of names that PEFT takes for those of experts before they were fused, where a model has such experts: an
adapter of a layer of such a name can only be told as one of its weight."""


def names_in_config(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """What PEFT's config calls each adapted layer, or weight of experts.

    Args:
        model: plain, whole, perhaps on meta.
        names: full names.
    """
    fused = bool(find_experts(model))
    return {name: f"{name}.weight" if fused and _is_taken(model, name) else name for name in names}


def _is_taken(model: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] in _TAKEN and any(name == layer for layer, _ in model.named_modules())


def targets(model: nn.Module, names: Iterable[str]) -> list[str]:
    """`target_parameters` of PEFT's config: endings that mean just these parameters of a model, full names else.

    Args:
        model: plain, whole, perhaps on meta.
        names: as in the config; those of layers are passed over.
    """
    parameters = [name for name, _ in model.named_parameters()]
    adapted = set(names).intersection(parameters)
    found = []
    for name in sorted(adapted):
        short = ".".join(name.split(".")[-2:])
        alike = {other for other in parameters if other == short or other.endswith(f".{short}")}
        found.append(short if alike <= adapted else name)
    return sorted(set(found))


def in_file(name: str, wanted: Sequence[str]) -> str:
    """The name that PEFT gives to a module of experts when it adapts one of its weights.

    Args:
        name: full name of the weight.
        wanted: full names of all weights of the same module that are adapted, in the module's order.
    """
    module = name.rpartition(".")[0]
    return module + ".base_layer" * (len(wanted) - 1 - list(wanted).index(name))


def flat(side: str, stack: Tensor) -> Tensor:
    """A stack of adapter matrices as PEFT lays it.

    Args:
        side: "A" or "B".
        stack: [experts, rank, inputs] of A, [experts, outputs, rank] of B.

    Returns:
        [experts x rank, inputs] or [outputs, rank x experts].
    """
    return stack.flatten(0, 1) if side == "A" else stack.permute(1, 2, 0).flatten(1)


def stacked(side: str, matrix: Tensor, experts: int) -> Tensor:
    """What `flat` was given, from what it returned.

    Args:
        side: "A" or "B".
        matrix: as PEFT lays it.
        experts: how many there are.
    """
    if side == "A":
        return matrix.reshape(experts, -1, matrix.shape[1])
    return matrix.reshape(matrix.shape[0], -1, experts).permute(2, 0, 1)


def from_file(
    model: nn.Module, config: PeftConfig, weights: Mapping[str, Tensor], *, part: bool = False
) -> dict[str, Tensor]:
    """The tensors of a file under the names and in the shapes that the adapted model gives them.

    Args:
        model: adapted or not.
        config: says which weights of experts are adapted.
        weights: name in the file, without PEFT's prefix -> tensor. What is no expert's is passed on.
        part: the model is a part of one, so the config may speak of what is not there.

    Raises:
        ModelError: another parameter is adapted, or no key is for one, or its size does not fit.
    """
    found = dict(weights)
    groups = find_experts(model) if config.parameters else ()
    names = [f"{group.name}.{key}" for group in groups for key in group.matrices]
    names += [f"{name}.weight" for name, module in model.named_modules() if linear_shape(module)]
    for item in config.parameters if not part else ():
        if not any(name == item or name.endswith(f".{item}") for name in names):
            what = (
                f"it adapts the parameter {item}, which is no weight of a layer or of experts in {type(model).__name__}"
                + _whose(model, item)
            )
            remedy = "merge it into its base with PEFT and start from that model"
            raise ModelError(what, where=str(config.directory), remedy=remedy)
    for group in groups:
        wanted = adapted_matrices(group, config)
        for name in wanted:
            for side in "AB":
                key = f"{in_file(name, wanted)}.lora_{side}.weight"
                matrix = found.pop(key, None)
                if matrix is None:
                    what = f"target_parameters says that {name} is adapted, but no key {key} is there"
                    raise ModelError(what, where=str(config.directory))
                if matrix.dim() != 2 or matrix.shape[side == "B"] % group.count:
                    what = f"{key} is {list(matrix.shape)}, which is nothing for {group.count} experts"
                    remedy = "is this the base that it was trained on?"
                    raise ModelError(what, where=str(config.directory), remedy=remedy)
                last = name.rpartition(".")[2]
                found[f"{group.name}.lora.{last}.lora_{side}.weight"] = stacked(side, matrix, group.count)
    return found


def _whose(model: nn.Module, item: str) -> str:
    """Why no adapter is for a weight that a model has: a clause, or ""."""
    for group in find_experts(model):
        if not group.matrices and any(
            f"{group.name}.{key}".endswith(f".{item}") for key in group.sliced + group.shared
        ):
            kind = type(model.get_submodule(group.name)).__name__
            return f" that can be adapted: {kind} computes in a way of its own, beside which no product can be laid"
    return ""


def adapted_matrices(group: Experts, config: PeftConfig) -> list[str]:
    """Full names of the matrices of a module of experts that a config adapts, in the module's order."""
    names = [f"{group.name}.{key}" for key in group.sliced if key in group.matrices]
    return [name for name in names if config.adapts_parameter(name)]
