"""Rotary position embedding on the CPU without the copies of `rotate_half`."""

from __future__ import annotations

from typing import Any, cast

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, where rotate_half((a, b)) = (-b, a).

    Args:
        x: [batch, heads, T, dim], dim even.
        cos: [batch, 1, T, dim] or what broadcasts to x; without gradient.
        sin: as cos.
    """
    return cast(torch.Tensor, _Rotate.apply(x, cos, sin))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        result = x * cos
        result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        result[..., half:].addcmul_(x[..., :half], sin[..., half:])
        ctx.save_for_backward(cos, sin)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        gradient = grad_outputs[0]
        half = gradient.shape[-1] // 2
        result = gradient * cos
        result[..., :half].addcmul_(gradient[..., half:], sin[..., half:])
        result[..., half:].addcmul_(gradient[..., :half], sin[..., :half], value=-1)
        return result, None, None
