"""silu(gate) * up keeping two tensors for the backward pass instead of three: silu(gate) is computed again there.

The operations are those that autograd would run, so values and gradients are the same to the bit; a gated MLP keeps a
fifth less.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate: any shape.
        up: the same shape and dtype.
    """
    return cast(torch.Tensor, _SiluProduct.apply(gate, up))


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gradient = grad_outputs[0]
        d_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return d_gate, F.silu(gate).mul_(gradient)
