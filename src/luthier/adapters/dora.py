"""DoRA: a layer's weight is taken apart into length and direction, and LoRA moves the direction alone.

y = m / ||W + s B A|| * (W + s B A) x + b, a length m and a norm for every output (Liu et al. 2024,
https://arxiv.org/abs/2402.09353, equation 5). The norm gets no gradient, as the paper's section 4.3 suggests and PEFT
does. Norms and lengths are float32 at least: in bfloat16 a length moves by less than its last digit and stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from luthier.hf.gather import blocks, coordinate_of, local_part
from luthier.hf.nf4 import dense
from luthier.hf.shards import fill

if TYPE_CHECKING:
    from luthier.adapters.embedding import LoraEmbedding
    from luthier.adapters.layer import LoraLayer

_ROWS = 4096
"""Rows of W + s B A that there are at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lengths and norms beside weights of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Magnitude(nn.Module):
    """The lengths of an adapted layer: `weight` [outputs], in float32 beside bfloat16 weights too.

    Attributes:
        total: sums over ranks what each knows of the squared norms, where the layer's inputs are dealt to several.
    """

    weight: nn.Parameter
    total: Callable[[Tensor], Tensor] | None

    def __init__(self, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, device=device, dtype=wide(dtype)))
        self.total = None

    def extra_repr(self) -> str:
        return str(len(self.weight))


@torch.no_grad()
def row_norms(
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    transposed: bool,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The norm of each output's row of W + s B A.

    Args:
        weight: [outputs, inputs], or [inputs, outputs] when transposed.
        down: A [rank, inputs].
        up: B [outputs, rank].
        scale: s.
        transposed: how the weight lies.
        total: of `Magnitude`.

    Returns:
        [outputs], float32 or float64.
    """
    squares = _squares(dense(weight), transposed, (down, up, scale))
    return (squares if total is None else total(squares)).sqrt()


def _squares(weight: Tensor, transposed: bool, product: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
    """[outputs]; with and without a product of zeros the very same, which the first lengths rely on."""
    rows = weight.t() if transposed else weight
    dtype = wide(weight.dtype)
    found = []
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        sums = rows[part].to(dtype).contiguous()
        if product is not None:
            down, up, scale = product
            sums = torch.addmm(sums, up[part].to(dtype), down.to(dtype), alpha=scale)
        found.append(torch.linalg.vector_norm(sums, dim=1).square())
    return found[0] if len(found) == 1 else torch.cat(found)


def factor(magnitude: Tensor, norms: Tensor) -> Tensor:
    """By how much each output grows: [outputs]. Of a row of zeros nothing is left to grow, and 0 stands for 0 / 0."""
    return magnitude / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def layer_factor(layer: LoraLayer) -> Tensor:
    """`factor` of an adapted layer as it is now; gradients flow into its lengths alone."""
    magnitude = layer.lora_magnitude_vector
    down, up = layer.lora_A.weight.detach(), layer.lora_B.effective.detach()
    scale, transposed = layer.lora_spec.scale, layer.lora_shape.transposed
    return factor(magnitude.weight, row_norms(layer.weight, down, up, scale, transposed, magnitude.total))


def rescaled(layer: LoraLayer, y: Tensor, by: Tensor | None = None) -> Tensor:
    """What a layer with LoRA gives, as DoRA has it. Where lengths are still the norms nothing changes, to the bit.

    Args:
        layer: adapted.
        y: [..., outputs], W x + b + s B A x.
        by: `layer_factor`, where it is known.

    Returns:
        [..., outputs], g (W x + s B A x) + b.
    """
    grown = layer_factor(layer) if by is None else by
    # g (y - b) + b, without a tensor of y's size for the difference
    shift = None if layer.bias is None else (1 - grown) * layer.bias
    if torch.compiler.is_compiling():
        return _rescale(y, grown, shift)
    return cast(Tensor, _Rescale.apply(y, grown, shift))


def dropped(layer: LoraLayer, y: Tensor, base: Tensor, low: Tensor) -> Tensor:
    """The same under dropout, by which PEFT drops inputs of the direction and not of the weight itself.

    Args:
        layer: adapted.
        y: [..., outputs], W x + b.
        base: W z, of an input z of which a part is dropped.
        low: s B A z.

    Returns:
        W x + b + (g - 1) W z + g s B A z.
    """
    grown = layer_factor(layer)
    return (y + (grown - 1) * base + grown * low).to(y.dtype)


def _rescale(y: Tensor, grown: Tensor, shift: Tensor | None) -> Tensor:
    out = y * grown if shift is None else torch.addcmul(shift.to(grown.dtype), y.to(grown.dtype), grown)
    return out.to(y.dtype)


class _Rescale(torch.autograd.Function):
    """y g + shift with one tensor kept, in y's own dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, grown: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, grown)
        ctx.shift = None if shift is None else shift.dtype
        return _rescale(y, grown, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, grown = ctx.saved_tensors
        rows, outputs = gradient.reshape(-1, gradient.shape[-1]), y.reshape(-1, y.shape[-1])
        needs_y, needs_grown, needs_shift = ctx.needs_input_grad
        dy = (gradient * grown).to(y.dtype) if needs_y else None
        d_grown = (rows.to(grown.dtype) * outputs).sum(0) if needs_grown else None
        d_shift = rows.sum(0, dtype=grown.dtype).to(ctx.shift) if needs_shift and ctx.shift is not None else None
        return dy, d_grown, d_shift


@torch.no_grad()
def initialise_magnitude(layer: LoraLayer | LoraEmbedding) -> None:
    """Give a layer its first lengths: the norms of its weight's rows. Called on all ranks that have parts of it."""
    place = layer.lora_magnitude_vector.weight
    norms = _whole_norms(layer.weight, layer.lora_shape.transposed).to(local_part(place).device)
    fill(place, norms)


def _whole_norms(weight: Tensor, transposed: bool) -> Tensor:
    """[outputs], of a weight that may lie in parts: each rank's squares are summed over those that hold others."""
    rows = 1 if transposed else 0
    dtype = wide(weight.dtype)
    if not isinstance(weight, DTensor):
        return _squares(weight, transposed).sqrt()
    mesh = weight.device_mesh
    local = local_part(weight)
    kind = mesh.device_type  # offloaded parts travel through the device that the ranks talk by
    device = local.device if local.device.type == kind else torch.device(kind, torch.cuda.current_device())
    squares = torch.zeros(weight.shape[rows], dtype=dtype, device=device)
    here = coordinate_of(weight, dist.get_rank())
    assert here is not None
    for own, place in blocks(weight, here):
        part = local[own].to(device)
        squares[place[rows]] += _squares(part, transposed)
    for index, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            dist.all_reduce(squares, group=mesh.get_group(index))
    return squares.sqrt()
