"""Where a model's mixtures of experts are: modules that hold the weights of many experts in one parameter each.

They are found by what they are, not by name: a module that counts its experts, whose parameters have one slice an
expert, and whose forward says how tokens come to it. Transformers' own expert plans (`base_model_ep_plan`) name the
same modules.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Literal

from torch import nn

Call = Literal["routed", "sorted", "even"]
"""How tokens come: with the experts and weights chosen for each; or sorted by expert, with a list of how many each
gets; or sorted by expert, as many for each."""

_INDEX = re.compile(r"ind(ex|ices)$|^selected_experts$")
_WEIGHTS = re.compile(r"weights$|scores$|probs$")
_COUNTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Experts:
    """One module of experts.

    Attributes:
        name: full name.
        count: how many experts there are.
        call: how its forward takes tokens.
        sliced: names of its parameters (relative to it, adapters included) whose first dimension is the experts, or the
            experts' rows laid end to end.
        shared: names of its other parameters, which all experts use.
        transposed: the matrices lie as [expert, inputs, outputs] instead of [expert, outputs, inputs]; None where the
            module does not say.
    """

    name: str
    count: int
    call: Call
    sliced: tuple[str, ...]
    shared: tuple[str, ...]
    transposed: bool | None

    @property
    def adapted(self) -> bool:
        """Whether it carries adapters."""
        return any(".lora_" in key for key in self.sliced)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the parameters that hold one matrix an expert, as Transformers' own forwards of experts read them:
        gate and up in one, then down. None where it is not said how they lie."""
        if self.transposed is None:
            return ()
        return tuple(name for name in ("gate_up_proj", "up_proj", "down_proj") if name in self.sliced)


def find_experts(model: nn.Module) -> tuple[Experts, ...]:
    """Every module of experts, in the model's order; it may be on meta, and carry adapters.

    Args:
        model: a Transformers model, or a part of one.
    """
    found = []
    calls = {kind: _call(kind) for kind in {type(module) for module in model.modules()}}
    for name, module in model.named_modules():
        call = calls[type(module)]
        stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        count = stacks[0].shape[0] if stacks else _count(module)  # a shard's own count is that of its part
        if call is None or count is None or (call != "routed" and (_count(module) is None or not stacks)):
            continue
        own = dict(module.named_parameters())
        sliced = tuple(
            k for k, p in own.items() if p.dim() > 1 and (p.shape[0] == count if stacks else not p.shape[0] % count)
        )
        if sliced:
            shared = tuple(key for key in own if key not in sliced)
            found.append(Experts(name, count, call, sliced, shared, getattr(module, "is_transposed", None)))
    return tuple(found)


def _count(module: nn.Module) -> int | None:
    return next((n for field in _COUNTS if isinstance(n := getattr(module, field, None), int)), None)


def _call(kind: type[nn.Module]) -> Call | None:
    """How tokens come to the forward of such modules, None where it is none of the ways of experts."""
    arguments = list(inspect.signature(kind.forward).parameters)[1:]
    if len(arguments) == 3 and _INDEX.search(arguments[1]) and _WEIGHTS.search(arguments[2]):
        return "routed"
    if len(arguments) == 2 and arguments[1] == "expert_size":
        return "sorted"
    return "even" if arguments == ["hidden_states"] else None
