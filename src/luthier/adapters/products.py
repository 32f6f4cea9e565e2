"""The arithmetic of a linear layer with a low-rank product beside it: y = x W^T + b + s (z A^T) B^T.

One autograd function for a layer, or for several layers with one input (q, k and v; gate and up). The product is added
inside the matrix multiplication, the input is kept once and beside it only z A^T, and the gradient of the input is
summed in place. Plain operations make the same numbers but write y three times and keep more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def base_product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """What the layer alone computes, by the very calls of `nn.Linear` and of Transformers' `Conv1D`, so to the bit.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], or [inputs, outputs] when transposed.
        bias: [outputs] or None.
        transposed: how the weight lies.

    Returns:
        [..., outputs].
    """
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.view(-1, x.size(-1))
    product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return product.view(*x.shape[:-1], weight.size(1))


def low_rank_products(
    x: Tensor,
    z: Tensor | None,
    scale: float,
    transposed: bool,
    layers: list[tuple[Tensor, Tensor | None, Tensor, Tensor]],
) -> tuple[Tensor, ...]:
    """The outputs of layers that share their input, each with its low-rank product.

    Args:
        x: [..., inputs], the layers' input, in the dtype of their weights.
        z: [..., inputs], the adapters' input where it is another one (after dropout); None for x.
        scale: factor of every low-rank product.
        transposed: whether the weights lie as [inputs, outputs].
        layers: for each layer its weight, its bias, A [rank, inputs] and B [outputs, rank]. All A and B have one
            dtype; where it is not x's, the low-rank part is computed in it, and the sum is rounded once.

    Returns:
        [..., outputs] for each layer, in the dtype of x.
    """
    flat = [tensor for layer in layers for tensor in layer]
    outputs: tuple[Tensor, ...] = _LowRankProducts.apply(x, z, scale, transposed, *flat)
    return outputs


class _LowRankProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, scale: float, transposed: bool, *layers: Any
    ) -> tuple[Tensor, ...]:
        weights, biases, downs, ups = (list(layers[i::4]) for i in range(4))
        low = _rows(x if z is None else z, downs[0].dtype) @ _stack(downs).t()
        low.mul_(scale)
        outputs = []
        start = 0
        for weight, bias, up in zip(weights, biases, ups, strict=True):
            end = start + up.size(1)
            y = base_product(x, weight, bias, transposed)
            total = _add_product(y.view(-1, y.size(-1)), low[:, start:end], up.t())
            outputs.append(torch.ops.aten._unsafe_view(total, y.shape))  # a view could not be changed in place later
            start = end
        needs_x = ctx.needs_input_grad[0]
        trains_weight = any(ctx.needs_input_grad[4::4])
        keeps_x = z is None or trains_weight
        ctx.save_for_backward(
            x if keeps_x else None, z, low, *downs, *ups, *(weights if needs_x else [None] * len(weights))
        )
        ctx.scale, ctx.transposed, ctx.shape, ctx.count = scale, transposed, x.shape, len(weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, z, low, *rest = ctx.saved_tensors
        n = ctx.count
        downs, ups, weights = rest[:n], rest[n : 2 * n], rest[2 * n :]
        needs = ctx.needs_input_grad
        needs_x, needs_z = needs[0], needs[1]
        x_rows = x.view(-1, x.size(-1)) if x is not None and any(needs[4::4]) else None
        d_low = torch.empty_like(low)
        dx: Tensor | None = None
        d_layers: list[Tensor | None] = [None] * (4 * n)
        start = 0
        for i, gradient in enumerate(gradients):
            rows = gradient.reshape(-1, gradient.size(-1))
            wide = rows.to(low.dtype)
            end = start + ups[i].size(1)
            torch.mm(wide, ups[i], out=d_low[:, start:end])
            if needs_x:
                weight = weights[i].t() if ctx.transposed else weights[i]
                dx = rows @ weight if dx is None else dx.addmm_(rows, weight)
            if needs[4 + 4 * i]:
                assert x_rows is not None
                d_layers[4 * i] = x_rows.t() @ rows if ctx.transposed else rows.t() @ x_rows
            if needs[5 + 4 * i]:
                d_layers[4 * i + 1] = rows.sum(0)
            if needs[7 + 4 * i]:
                d_layers[4 * i + 3] = (low[:, start:end].t() @ wide).t()  # this order is the faster one
            start = end
        d_low.mul_(ctx.scale)
        if any(needs[6::4]):
            source = _rows(x if z is None else z, low.dtype)
            d_layers[2::4] = (d_low.t() @ source).split([down.size(0) for down in downs])
        dz: Tensor | None = None
        if z is None and needs_x:
            assert dx is not None
            dx = _add_product(dx, d_low, _stack(downs))
        elif needs_z:
            dz = (d_low @ _stack(downs)).to(z.dtype).view(ctx.shape)
        return (None if dx is None else dx.view(ctx.shape), dz, None, None, *d_layers)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.reshape(-1, x.size(-1)).to(dtype)


def _stack(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place where the dtypes allow it, otherwise summed in the product's dtype."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.to(left.dtype).addmm_(left, right).to(total.dtype)
