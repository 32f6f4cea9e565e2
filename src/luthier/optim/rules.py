"""One update rule each: what torch.optim computes, as functions of weights, gradients and states.

A rule changes `weights` and `states` in place. The element-wise ones take any pieces of tensors; the others whole
matrices. Weights and gradients arrive in fp32 (fp64 weights: fp64), whatever the model stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor as torch_adafactor
from torch.optim._muon import muon as torch_muon

Pieces = Sequence[Tensor]
States = dict[str, list[Tensor]]
Group = dict[str, Any]

_FUSED = ("cpu", "cuda", "mps", "xpu")
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of optimizer updates.

    Attributes:
        update: update(weights, gradients, states, steps, group); `steps` counts from 1 at the first update.
        states: names of the states that a parameter of this shape has, each with its shape.
        elementwise: whether parts of a tensor may be updated apart from each other.
    """

    update: Callable[[Pieces, Pieces, States, Sequence[int], Group], None]
    states: Callable[[torch.Size, Group], dict[str, torch.Size]]
    elementwise: bool


def adamw(weights: Pieces, gradients: Pieces, states: States, steps: Sequence[int], group: Group) -> None:
    """AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) by torch's fused kernel where there is one.

    w <- w (1 - lr decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)
    """
    beta1, beta2 = group["betas"]
    averages, squares = states["exp_avg"], states["exp_avg_sq"]
    if weights[0].device.type in _FUSED:
        made = {step: torch.tensor(float(step), device=weights[0].device) for step in set(steps)}
        torch._fused_adamw_(
            list(weights), list(gradients), averages, squares, [], [made[step] for step in steps],
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["epsilon"],
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    for weight, gradient, average, square, step in zip(weights, gradients, averages, squares, steps, strict=True):
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["epsilon"])
        weight.addcdiv_(average, scale, value=-group["lr"] / (1 - beta1**step))


def sgd(weights: Pieces, gradients: Pieces, states: States, steps: Sequence[int], group: Group) -> None:
    """Gradient descent with momentum and decoupled decay.

    w <- w (1 - lr decay);  b <- momentum b + g;  w <- w - lr b   (Nesterov: w <- w - lr (g + momentum b))
    """
    buffers = states.get("momentum_buffer", [])
    for position, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        direction = gradient
        if buffers:
            buffer = buffers[position].mul_(group["momentum"]).add_(gradient)
            direction = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        weight.add_(direction, alpha=-group["lr"])


def adafactor(weights: Pieces, gradients: Pieces, states: States, steps: Sequence[int], group: Group) -> None:
    """torch.optim.Adafactor: second moments by row and column, step size relative to the weight's own size.

    Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235.
    """
    for position, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        at = {name: tensors[position] for name, tensors in states.items()}
        torch_adafactor(
            [weight], [gradient], [at.get("row_var")], [at.get("col_var")], [at.get("variance")],
            [torch.tensor(float(steps[position] - 1))],
            d=group["clip_threshold"], lr=group["lr"], beta2_decay=group["beta2_decay"],
            weight_decay=group["weight_decay"], eps1=torch.finfo(weight.dtype).eps, eps2=1e-3, maximize=False,
            foreach=False,
        )  # fmt: skip


def muon(weights: Pieces, gradients: Pieces, states: States, steps: Sequence[int], group: Group) -> None:
    """torch.optim.Muon: the momentum's nearest orthogonal matrix, by Newton-Schulz iterations (which run in bf16).

    Jordan 2024, https://kellerjordan.github.io/posts/muon/. The step has the size of AdamW's (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982: 0.2 sqrt(max(rows, columns))), so one learning rate serves both parts of a model.
    """
    torch_muon(
        list(weights), list(gradients), states["momentum_buffer"],
        lr=group["lr"], weight_decay=group["weight_decay"], momentum=group["momentum"], nesterov=group["nesterov"],
        ns_coefficients=_NEWTON_SCHULZ, ns_steps=group["ns_steps"], eps=1e-7, adjust_lr_fn="match_rms_adamw",
        has_complex=False,
    )  # fmt: skip


def _adamw_states(shape: torch.Size, group: Group) -> dict[str, torch.Size]:
    return {"exp_avg": shape, "exp_avg_sq": shape}


def _momentum(shape: torch.Size, group: Group) -> dict[str, torch.Size]:
    return {"momentum_buffer": shape} if group["momentum"] else {}


def _factored(shape: torch.Size, group: Group) -> dict[str, torch.Size]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": torch.Size((*shape[:-1], 1)), "col_var": torch.Size((*shape[:-2], 1, shape[-1]))}


RULES: dict[str, Rule] = {
    "adamw": Rule(adamw, _adamw_states, elementwise=True),
    "sgd": Rule(sgd, _momentum, elementwise=True),
    "adafactor": Rule(adafactor, _factored, elementwise=False),
    "muon": Rule(muon, lambda shape, group: {"momentum_buffer": shape}, elementwise=False),
}
