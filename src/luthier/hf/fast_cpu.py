"""Faster forwards for modules of a model on the CPU, each compared with the module's own before it takes its place.

A module keeps its parameters, children and name; only its class becomes a subclass of the same name, whose forward
takes the fast way for plain bf16 or fp32 tensors on the CPU and the module's own way for everything else. So it may be
done before or after weights are loaded, with adapters, checkpointing and sharding.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch

from luthier.hf.fast_norm import rms_norm
from luthier.hf.fast_rope import rotate

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
    return [*_accelerate_norms(model), *_accelerate_rope(model)]


def _accelerate_norms(model: torch.nn.Module) -> list[str]:
    """Give every RMSNorm that is one of the two known forms the fast forward."""
    replaced: Counter[str] = Counter()
    verdicts: dict[tuple[Any, ...], float | None] = {}
    for module in model.modules():
        if not _looks_like_rms_norm(module):
            continue
        weight = cast(torch.Tensor, module.weight)
        key = (type(module), tuple(weight.shape), weight.dtype, _eps(module))
        if key not in verdicts:
            verdicts[key] = _form_of_norm(module)
        offset = verdicts[key]
        if offset is not None:
            name = type(module).__name__
            module.__class__ = _fast_norm_class(cast(Any, type(module)), offset)
            replaced[name] += 1
    return [f"{count} {name} by a norm in few passes" for name, count in replaced.items()]


def _looks_like_rms_norm(module: torch.nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    named = "RMSNorm" in type(module).__name__ and list(parameters) == ["weight"] and parameters["weight"].ndim == 1
    return named and _eps(module) is not None and not isinstance(module, _FastNorm)


def _eps(module: torch.nn.Module) -> float | None:
    """The small number under the root, by the names that Transformers' models use."""
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(value) if isinstance(value, int | float) else None


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
        fast = functools.partial(rms_norm, weight=trial_weight, eps=cast(float, _eps(module)), offset=offset)
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
            return rms_norm(hidden_states, weight, cast(float, _eps(self)), self.luthier_offset)
        return cast(torch.Tensor, super().forward(hidden_states))


@functools.cache
def _fast_norm_class(own: Any, offset: float) -> type[torch.nn.Module]:
    """A subclass of a norm's class, under the same name: Transformers tells norms by the name of their class."""
    fast = type(own.__name__, (_FastNorm, own), {"__module__": own.__module__, "luthier_offset": offset})
    return cast(type[torch.nn.Module], fast)


def _accelerate_rope(model: torch.nn.Module) -> list[str]:
    """Put a faster `apply_rotary_pos_emb` into the modelling files that the model's layers come from."""
    done = []
    for name in sorted({type(module).__module__ for module in model.modules()}):
        source = sys.modules.get(name)
        own = getattr(source, "apply_rotary_pos_emb", None)
        if source is None or own is None:
            continue
        if not hasattr(own, "luthier_own") and not _replace_rope(source, own):
            continue
        done.append(f"rotary embedding of {name.rsplit('.', 1)[-1]} without copies")
    return done


def _replace_rope(source: ModuleType, own: Callable[..., Any]) -> bool:
    """Replace a modelling file's function if `rotate` computes the same; everything unusual goes to its own."""
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        logger.info("rotary embedding of %s left as it is: other arguments", source.__name__)
        return False

    @functools.wraps(own)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        usual = all(map(_plain, (q, k, cos, sin))) and q.dtype == k.dtype == cos.dtype == sin.dtype
        usual = usual and cos.shape == sin.shape and cos.ndim == q.ndim - 1 and not cos.requires_grad
        if usual and q.shape[-1] == k.shape[-1] == cos.shape[-1] and cos.shape[-1] % 2 == 0:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return rotate(q, cos, sin), rotate(k, cos, sin)
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, generator=generator).requires_grad_() for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, 8, generator=generator)
    for number, leaf in enumerate((q, k)):
        gradient = torch.randn(leaf.shape, generator=generator)
        pick = lambda function, number=number: lambda *inputs: function(*inputs)[number]  # noqa: E731
        if not _agree(pick(own), pick(apply_rotary_pos_emb), (q, k, cos, sin), (leaf,), gradient):
            logger.info("rotary embedding of %s left as it is: another rotation", source.__name__)
            return False
    apply_rotary_pos_emb.luthier_own = own  # type: ignore[attr-defined]
    source.apply_rotary_pos_emb = apply_rotary_pos_emb
    return True


def _plain(tensor: torch.Tensor) -> bool:
    """A tensor that the fast ways are for: on the CPU, bf16 or fp32, not sharded, not traced."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return usual and tensor.dtype in _DTYPES and not torch.compiler.is_compiling()


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
