"""What routers decide while a model runs: where it can be seen, and where the gradient of an auxiliary loss goes in.

Which output of which module holds a router's logits, Transformers itself says (`_can_record_outputs`). All hangs on the
modules, so it works on any layout and with any recomputation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from luthier.batch import Batch
from luthier.errors import first_line
from luthier.hf.experts import find_experts

_BIAS = re.compile(r"(correction|expert)_bias$")
_COUNTED: ContextVar[Tensor | None] = ContextVar("luthier_counted", default=None)
"""bool [T]: which positions of the running row are tokens of documents."""


@contextmanager
def counted(batch: Batch) -> Iterator[None]:
    """Routers within count the tokens of this row's documents, and not what fills it up (whose targets are below 0)."""
    token = _COUNTED.set(batch.targets[0] >= 0)
    try:
        yield
    finally:
        _COUNTED.reset(token)


@dataclass(frozen=True, slots=True)
class Router:
    """A module that chooses experts.

    Attributes:
        name: full name.
        index: which of its outputs are the logits.
    """

    name: str
    index: int


def find_routers(model: Any) -> tuple[Router, ...]:
    """The routers whose logits Transformers records for its auxiliary loss, in the model's order."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    found = recorders.get("router_logits") or []
    known = [one for one in (found if isinstance(found, list) else [found]) if hasattr(one, "target_class")]
    return tuple(
        Router(name, recorder.index)
        for name, module in model.named_modules()
        for recorder in known
        if isinstance(module, recorder.target_class)
        and (recorder.layer_name is None or f".{name}".endswith(f".{recorder.layer_name}"))
    )


def auxiliary_loss_fault(model: Any, formula: Callable[[Sequence[Tensor], Tensor, int], Tensor]) -> str:
    """Why a model's own auxiliary loss cannot be computed by a formula, as a clause; "" where it can.

    Transformers' function is tried on random logits: only a model of which it gives the very number is taken.

    Args:
        model: on meta or not.
        formula: (logits [T, experts] of each layer, bool [T] which count, experts a token) to the loss.
    """
    function = getattr(sys.modules[_own_class(model).__module__], "load_balancing_loss_func", None)
    if function is None or not find_routers(model):
        return "it has no auxiliary loss in Transformers"
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(7, 5, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0]])
    try:
        theirs = function(layers, 5, 2, mask)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:  # another signature, or shapes
        return f"its auxiliary loss is of a form of its own ({first_line(error)})"
    same = (
        isinstance(theirs, Tensor)
        and theirs.dim() == 0
        and abs(float(theirs) - float(formula(layers, mask[0] == 1, 2))) < 1e-5
    )
    return "" if same else "its auxiliary loss is of a form of its own"


def auxiliary_loss_of(model: Any) -> float:
    """The coefficient with which Transformers adds the auxiliary loss to this model's: 0 unless its config asks for
    `output_router_logits`."""
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", None) or getattr(config, "aux_loss_coef", None) or 0.0)


def experts_per_token(model: Any) -> int:
    """How many experts a token visits."""
    return _number(model, ("num_experts_per_tok", "moe_top_k"))


def experts_of(model: Any) -> int:
    """How many experts a router chooses from; of a part of a model too, which may have none."""
    return _number(model, ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"))


def _number(model: Any, names: Sequence[str]) -> int:
    config = model.config.get_text_config()
    for owner in (model, config, getattr(config, "ffn_config", None)):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    raise AttributeError(f"{type(model).__name__} and its config have none of {', '.join(names)}")


def find_biases(model: nn.Module) -> dict[str, str]:
    """Module of experts -> full name of the bias by which its router prefers experts, where there is one."""
    found = {}
    for group in find_experts(model):
        parent = group.name.rpartition(".")[0]
        block = model.get_submodule(parent)
        for name, value in [*block.named_buffers(), *block.named_parameters()]:
            if _BIAS.search(name) and value.numel() == group.count:
                found[group.name] = f"{parent}.{name}"
    return found


def watch_choices(model: nn.Module, names: Sequence[str], seen: Callable[[str, Tensor], None]) -> None:
    """Call `seen` with how many tokens chose each expert, whenever a module of experts runs forward.

    Args:
        model: perhaps with its experts dealt out.
        names: of modules of experts.
        seen: given the name, and float64 [experts]; not called when a forward pass is repeated for the backward pass.
    """
    counts = {group.name: group.count for group in find_experts(model)}

    def hook(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        mask = _COUNTED.get()
        if mask is None or _is_repeated():
            return
        index = arguments[1] if len(arguments) > 1 else next(v for k, v in keywords.items() if k.endswith(_INDEX))
        weights = mask.to(torch.float64).repeat_interleave(index.shape[-1])
        seen(name, weights.new_zeros(counts[name]).scatter_add_(0, index.reshape(-1), weights))

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, arguments, keywords, name=name: hook(name, arguments, keywords), with_kwargs=True
        )


_INDEX = ("index", "indices", "experts")


HandOn = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(a value that carries gradients, logits [T, experts], which tokens count: None in a repeated pass) to that value."""


def balance_routers(model: nn.Module, routers: Sequence[Router], hand_on: HandOn) -> None:
    """Put a function between routers and what uses their choice.

    Args:
        model: its routers.
        routers: which.
        hand_on: called in every forward pass, repeated ones included, that knows which tokens count. What it returns
            goes on in the place of its first argument.
    """

    def hook(router: Router, output: Any) -> Any:
        repeated = _is_repeated()
        mask = None if repeated else _COUNTED.get()
        if mask is None and not repeated:
            return None
        outputs = list(output) if isinstance(output, tuple) else [output]
        # What is computed from the logits carries their gradient; where the module gives nothing else, they themselves.
        others = [i for i, value in enumerate(outputs) if i != router.index and _carries(value)]
        place, logits = others[0] if others else router.index, outputs[router.index]
        outputs[place] = hand_on(outputs[place], logits.reshape(-1, logits.shape[-1]), mask)
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]

    for router in routers:
        model.get_submodule(router.name).register_forward_hook(
            lambda module, arguments, output, router=router: hook(router, output)
        )


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _own_class(model: Any) -> type[Any]:
    """The class that Transformers defines, whatever FSDP has made of it."""
    return next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))


def _is_repeated() -> bool:
    """Whether this forward pass runs inside a backward pass, which repeats it to have its tensors again."""
    return torch._C._current_graph_task_id() != -1
