"""Tensors that lie in parts on several ranks: what lies where, and a whole one on the rank that needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation

from luthier.hf.nf4 import dense

Block = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where a block lies in a rank's part, and where in the whole tensor."""


def plain_class(model: Any) -> type[Any]:
    """The class of a model as it was before FSDP gave it one of its own."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Let FSDP give back gathered weights that a forward pass has left behind, so that parameters are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without history; the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def blocks(tensor: DTensor, coordinate: Sequence[int]) -> Iterator[Block]:
    """What a rank holds of a tensor: mostly one block, several where fused weights are dealt out evenly.

    Args:
        tensor: sharded or replicated, in no part a sum.
        coordinate: of the rank in the tensor's mesh.

    Yields:
        blocks without overlap that fill the rank's part.
    """
    if tensor.ndim == 0:
        yield (), ()
        return
    cutter = DtensorShardOperation(tensor)  # the rule by which the loader cuts
    ranges: list[list[tuple[slice, slice]]] = []
    for dimension, size in enumerate(tensor.shape):
        intervals = [(0, size)]
        for index, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) not in (dimension, dimension - tensor.ndim):
                continue
            place, parts = coordinate[index], tensor.device_mesh.size(index)
            if placement.is_shard():
                intervals = cutter._compute_contiguous_slice(intervals, place, parts)
            else:
                factor = placement.split_factor  # type: ignore[attr-defined]
                intervals = cutter._compute_strided_slice(intervals, place, parts, factor)
        found, start = [], 0
        for begin, end in intervals:
            if end > begin:
                found.append((slice(start, start + end - begin), slice(begin, end)))
                start += end - begin
        ranges.append(found)
    for block in itertools.product(*ranges):
        yield tuple(local for local, _ in block), tuple(whole for _, whole in block)


def coordinate_of(tensor: DTensor, rank: int) -> list[int] | None:
    """Where a rank stands in a tensor's mesh; None where it stands outside."""
    found = (tensor.device_mesh.mesh == rank).nonzero()
    return [int(i) for i in found[0]] if len(found) else None


def holders(tensor: DTensor, rank: int) -> list[tuple[list[int], int]]:
    """[(coordinate, rank)] of those who together hold one copy of a tensor, with `rank` among them where it can be."""
    here = coordinate_of(tensor, rank)
    assert here is not None
    axes = [
        [here[index]] if placement.is_replicate() else range(tensor.device_mesh.size(index))
        for index, placement in enumerate(tensor.placements)
    ]
    ranks = tensor.device_mesh.mesh
    return [(list(at), int(ranks[at])) for at in itertools.product(*axes)]


@torch.no_grad()
def gather(tensor: torch.Tensor, destination: int) -> torch.Tensor | None:
    """The whole tensor on one rank, not quantised; elsewhere nothing but the own part is held.

    Args:
        tensor: a DTensor, of which all ranks of its mesh call this in the same order, or a plain one.
        destination: global rank.

    Returns:
        the whole tensor on `destination`, where nothing was cut the rank's own memory; None elsewhere.
    """
    here = dist.get_rank() if dist.is_initialized() else destination
    if not isinstance(tensor, DTensor):
        return dense(tensor.detach()) if here == destination else None
    if coordinate_of(tensor, destination) is None:
        return None  # that rank gathers from others, which hold the same
    local = dense(local_part(tensor))
    kind = tensor.device_mesh.device_type  # offloaded shards travel through the device that the ranks talk by
    device = local.device if local.device.type == kind else torch.device(kind, torch.cuda.current_device())
    sources = holders(tensor, destination)
    if len(sources) == 1:
        return local if here == destination else None
    if here != destination:
        if any(rank == here for _, rank in sources) and local.numel():
            dist.send(local.to(device).contiguous().view(-1).view(torch.uint8), destination)
        return None
    whole = local.new_empty(tensor.shape)
    for coordinate, rank in sources:
        found = list(blocks(tensor, coordinate))
        if not found:
            continue
        part = local
        if rank != here:
            shape = [max(block[0][axis].stop for block in found) for axis in range(tensor.ndim)]
            part = torch.empty(shape, dtype=local.dtype, device=device)
            dist.recv(part.view(-1).view(torch.uint8), rank)
        for there, place in found:
            whole[place].copy_(part[there])
    return whole
