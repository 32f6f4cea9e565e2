"""RMSNorm on the CPU in few passes over memory, forward and backward.

Two forms are known: weight * round(x / rms) (llama) and round((1 + weight) * x / rms) (gemma). The backward pass is
torch's fused one of LayerNorm with mean 0: its gradient is that of RMSNorm less the mean of gradient * weight.
"""

from __future__ import annotations

from typing import Any, cast

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """(offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        x: [..., dim], bf16 or fp32 on the CPU.
        weight: [dim], in the dtype of x.
        eps: added to the mean square.
        offset: 0 (llama: x / rms is rounded before it is multiplied) or 1 (gemma: rounded once, at the end).
    """
    return cast(torch.Tensor, _RmsNorm.apply(x, weight, eps, offset))


def eps_of(norm: torch.nn.Module) -> float | None:
    """The small number under a norm's root, by the names that Transformers' models use; None where it does not say."""
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(value) if isinstance(value, int | float) else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        if x.dtype == torch.float32:
            mean_square = x.square().mean(-1, keepdim=True)
            wide = torch.mul(x, inverse := mean_square.add_(eps).rsqrt_())
        else:
            wide = x.to(torch.float32)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            wide.mul_(inverse := norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
        if offset:
            result = wide.mul_(weight.to(torch.float32) + offset).to(x.dtype)
        else:
            result = wide.to(x.dtype).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        dim = x.shape[-1]
        gamma = weight.to(torch.float32) + ctx.offset
        wants = [bool(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[1]), False]
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, [dim], torch.zeros_like(inverse), inverse, gamma, None, wants
        )
        if wants[0]:
            mean = torch.mv(gradient.view(-1, dim), gamma.to(gradient.dtype)).view(inverse.shape)
            d_x.add_((mean * inverse).div_(dim).to(d_x.dtype))
        return d_x, None if d_weight is None else d_weight.to(weight.dtype), None, None
