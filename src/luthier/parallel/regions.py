"""Where activations of tensor parallelism change hands: the forward of each function is the backward of its partner.

| function | forward | backward |
| --- | --- | --- |
| `enter` | as it is | sum over ranks |
| `leave` | sum over ranks | as it is |
| `gather` | put slices together | take the own slice |
| `cut` | take the own slice | put slices together |
| `gather_partial` | put slices together | sum over ranks, take the own slice |
| `reduce_cut` | sum over ranks, take the own slice | put slices together |

The first two are the f and g of Shoeybi et al. (2019, https://arxiv.org/abs/1909.08053), the last two those of
Korthikanti et al. (2022, https://arxiv.org/abs/2205.05198). Slices are those of DTensor's `Shard`: of length
ceil(size / ranks), the last ones shorter. Functional collectives, so that a compiler sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks that share the work, and this rank's place among them.

    Attributes:
        group: of torch.distributed.
        rank: place in the group.
        size: ranks in it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Ring:
        """The ring of a one-dimensional mesh."""
        return Ring(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def span(self, size: int) -> tuple[int, int]:
        """First and one past the last of `size` positions that this rank holds."""
        part = -(-size // self.size)
        return min(self.rank * part, size), min((self.rank + 1) * part, size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a copy of a module talks to the same ranks


def enter(x: Tensor, ring: Ring) -> Tensor:
    """x, the same on all ranks, goes into work that each rank does a part of: its gradient is the sum of theirs."""
    return cast(Tensor, _Enter.apply(x, ring)) if x.requires_grad and torch.is_grad_enabled() else x


def leave(x: Tensor, ring: Ring) -> Tensor:
    """The sum over ranks of what each has computed; its gradient is the same on all."""
    return cast(Tensor, _Leave.apply(x, ring))


def gather(x: Tensor, ring: Ring, dim: int, size: int) -> Tensor:
    """Slices of a tensor put together along `dim`, whose whole length is `size`, for work that all ranks do alike."""
    return cast(Tensor, _Gather.apply(x, ring, dim, size, False))


def gather_partial(x: Tensor, ring: Ring, dim: int, size: int) -> Tensor:
    """As `gather`, for work that each rank does a part of."""
    return cast(Tensor, _Gather.apply(x, ring, dim, size, True))


def cut(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """This rank's slice of a tensor that is the same on all."""
    return cast(Tensor, _Cut.apply(x, ring, dim, False))


def reduce_cut(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """This rank's slice of the sum over ranks."""
    return cast(Tensor, _Cut.apply(x, ring, dim, True))


def even(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """x with zeros behind it, so that all slices are of one length."""
    return _padded(x, dim, -(-x.shape[dim] // ring.size) * ring.size)


def total(x: Tensor, ring: Ring) -> Tensor:
    """The sum over ranks, without a gradient."""
    return _sum(x.detach(), ring)


def _sum(x: Tensor, ring: Ring) -> Tensor:
    return cast(Tensor, funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", ring.group)))


def _slice(x: Tensor, ring: Ring, dim: int) -> Tensor:
    start, stop = ring.span(x.shape[dim])
    return _own_memory(x, dim, start, stop)


def _join(x: Tensor, ring: Ring, dim: int, size: int) -> Tensor:
    """Slices to the whole. Collectives want equal ones, so short ones travel with padding."""
    parts = funcol.wait_tensor(funcol.all_gather_single(_padded(x, dim, -(-size // ring.size)), 0, ring.group))
    whole = torch.cat(parts.chunk(ring.size, 0), dim) if dim else parts
    return whole if whole.shape[dim] == size else _own_memory(whole, dim, 0, size)


def _sum_slice(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """The own slice of the sum over ranks, by one reduce-scatter."""
    size = x.shape[dim]
    part = -(-size // ring.size)
    whole = _padded(x, dim, part * ring.size)
    stacked = torch.cat(whole.chunk(ring.size, dim), 0) if dim else whole
    own: Tensor = funcol.wait_tensor(funcol.reduce_scatter_single(stacked.contiguous(), "sum", 0, ring.group))
    start, stop = ring.span(size)
    return own if own.shape[dim] == stop - start else _own_memory(own, dim, 0, stop - start)


def _own_memory(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """A slice that is no view: what follows may change it in place."""
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x.contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _sum(gradients[0], ctx.ring), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        return _sum(x, ring)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, dim: int, size: int, partial: bool) -> Tensor:
        ctx.ring, ctx.dim, ctx.partial = ring, dim % x.ndim, partial
        return _join(x, ring, dim % x.ndim, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = _sum_slice if ctx.partial else _slice
        return back(gradients[0], ctx.ring, ctx.dim), None, None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, dim: int, partial: bool) -> Tensor:
        ctx.ring, ctx.dim, ctx.size = ring, dim % x.ndim, x.shape[dim]
        return (_sum_slice if partial else _slice)(x, ring, ctx.dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _join(gradients[0], ctx.ring, ctx.dim, ctx.size), None, None, None
