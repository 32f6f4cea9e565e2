"""Faster forwards for modules of a model on the CPU, each compared with the module's own before it takes its place.

A module keeps its parameters, children and name; only its class becomes a subclass of the same name, whose forward
takes the fast way for plain bf16 or fp32 tensors on the CPU and the module's own way for everything else. So it may be
done before or after weights are loaded, with adapters, checkpointing and sharding. Where no gradients are recorded
(evaluation, generation, the check of an export) the module's own way is taken too: plain Transformers to the bit.

RMSNorm is worth it for its speed (with its gradient, Transformers' own takes about four times as long), the gated MLP
for its memory. The same was tried for rotary embeddings: 1 % of a step, and the function is global to its modelling
file, so it would change plain models too.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch

from luthier.hf.fast_mlp import silu_product
from luthier.hf.fast_norm import eps_of, rms_norm

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)
"""float64 is left alone: there plain Transformers rounds to fp32 in places, and a proof wants exactly that."""
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
"""Largest difference over largest entry between two right ways to compute the same thing, with room."""


def accelerate_model(model: torch.nn.Module) -> list[str]:
    """Replace what can be replaced, in place.

    Args:
        model: on the CPU or on meta; a model elsewhere is left alone.

    Returns:
        one line for each kind of replacement; what was left alone, and why, is logged.
    """
    if any(parameter.device.type not in ("cpu", "meta") for parameter in model.parameters()):
        return []
    replaced: Counter[str] = Counter()
    verdicts: dict[tuple[Any, ...], float | None] = {}
    verdicts_mlp: dict[type[torch.nn.Module], bool] = {}
    for module in model.modules():
        if _looks_like_gated_mlp(module) and not isinstance(module, _LeanMlp):
            kind = type(module)
            if kind not in verdicts_mlp:
                verdicts_mlp[kind] = _is_silu_product(cast(Any, module))
            if verdicts_mlp[kind]:
                module.__class__ = _lean_mlp_class(cast(Any, kind))
                replaced[kind.__name__] += 1
        if not _looks_like_rms_norm(module):
            continue
        weight = cast(torch.Tensor, module.weight)
        key = (type(module), tuple(weight.shape), weight.dtype, eps_of(module))
        if key not in verdicts:
            verdicts[key] = _form_of_norm(module)
        offset = verdicts[key]
        if offset is not None:
            name = type(module).__name__
            module.__class__ = _fast_norm_class(cast(Any, type(module)), offset)
            replaced[name] += 1
    return [f"{count} {name} by a faster or leaner forward" for name, count in replaced.items()]


def _looks_like_gated_mlp(module: torch.nn.Module) -> bool:
    return {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _is_silu_product(module: Any) -> bool:
    """Whether this MLP's own forward is down(silu(gate(x)) * up(x)), to the bit; tried on three small layers."""
    trial = copy.copy(module)
    trial._modules = {"act_fn": module.act_fn}
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = torch.nn.Linear(8, 8, bias=False)
        layer.weight.data = torch.randn(8, 8, generator=generator)
        trial._modules[name] = layer
    x = torch.randn(5, 8, generator=generator)
    try:
        same = torch.equal(trial(x), _lean_mlp(trial, x))
    except (RuntimeError, TypeError, AttributeError) as error:
        logger.info("%s cannot be compared: %s", type(module).__name__, error)
        return False
    if not same:
        logger.info("%s left as it is: it is no plain gated MLP", type(module).__name__)
    return same


def _lean_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, module.down_proj(silu_product(module.gate_proj(x), module.up_proj(x))))


class _LeanMlp(torch.nn.Module):
    """Mark of a gated MLP that has been replaced. Its layers are called as modules, so adapters take part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _lean_mlp(self, x) if _plain(x) else cast(torch.Tensor, super().forward(x))


@functools.cache
def _lean_mlp_class(own: Any) -> type[torch.nn.Module]:
    """A subclass of an MLP's class, under the same name."""
    return cast(type[torch.nn.Module], type(own.__name__, (_LeanMlp, own), {"__module__": own.__module__}))


def _looks_like_rms_norm(module: torch.nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    named = "RMSNorm" in type(module).__name__ and list(parameters) == ["weight"] and parameters["weight"].ndim == 1
    return named and eps_of(module) is not None and not isinstance(module, _FastNorm)


def _form_of_norm(module: torch.nn.Module) -> float | None:
    """The offset (0 or 1) with which `rms_norm` is this module's own forward and backward; None if neither is."""
    weight = cast(torch.Tensor, module.weight)
    if weight.dtype not in _DTYPES:
        return None
    trial = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    trial_weight = cast(torch.Tensor, trial.weight)
    with torch.no_grad():
        trial_weight.copy_(torch.randn(trial_weight.shape, generator=generator) + 0.5)
    trial_weight.requires_grad_()
    x = (torch.randn(7, len(trial_weight), generator=generator) * 3 + 0.5).to(weight.dtype).requires_grad_()
    gradient = torch.randn(x.shape, generator=generator).to(weight.dtype)
    for offset in (0.0, 1.0):
        fast = functools.partial(rms_norm, weight=trial_weight, eps=cast(float, eps_of(module)), offset=offset)
        if _agree(trial, fast, (x,), (x, trial_weight), gradient):
            return offset
    logger.info("%s left as it is: neither form of a fast RMSNorm computes the same", type(module).__name__)
    return None


class _FastNorm(torch.nn.Module):
    """Mark of a norm that has been replaced; `luthier_offset` and the class's own forward come from its subclasses."""

    luthier_offset: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = cast(torch.Tensor, self.weight)
        if _plain(hidden_states) and _plain(weight) and hidden_states.dtype == weight.dtype:
            return rms_norm(hidden_states, weight, cast(float, eps_of(self)), self.luthier_offset)
        return cast(torch.Tensor, super().forward(hidden_states))


@functools.cache
def _fast_norm_class(own: Any, offset: float) -> type[torch.nn.Module]:
    """A subclass of a norm's class, under the same name: Transformers tells norms by the name of their class."""
    fast = type(own.__name__, (_FastNorm, own), {"__module__": own.__module__, "luthier_offset": offset})
    return cast(type[torch.nn.Module], fast)


def _plain(tensor: torch.Tensor) -> bool:
    """A tensor that the fast ways are for: in training, on the CPU, bf16 or fp32, not sharded, not traced."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return usual and training and tensor.dtype in _DTYPES


def _agree(
    own: Callable[..., torch.Tensor],
    fast: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    leaves: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
) -> bool:
    """Whether two functions give the same value and the same gradients for `leaves`, to rounding."""
    results = []
    for function in (own, fast):
        try:
            output = function(*inputs)
            results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient)])
        except (RuntimeError, TypeError, ValueError) as error:
            logger.info("%s cannot be compared: %s", own, error)
            return False
    bound = _TOLERANCE[gradient.dtype]
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool((a - b).abs().max() <= bound * a.abs().max())
        for a, b in zip(*results, strict=True)
    )
