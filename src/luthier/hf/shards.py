"""A whole tensor and the part of it that this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation

from luthier.hf.gather import local_part


def own_part(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter whose whole value is at hand.

    Args:
        parameter: a DTensor of any placements, or a plain tensor.
        whole: its full value.

    Returns:
        in the shape of the local part; `whole` itself for a plain parameter.
    """
    if not isinstance(parameter, DTensor):
        return whole
    part = DtensorShardOperation(parameter).shard_tensor(whole, device=whole.device, dtype=whole.dtype)
    assert part is not None
    return part


@torch.no_grad()
def fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Give a parameter, sharded or not, the value `whole`; no communication, every rank has the whole value."""
    local_part(parameter).copy_(own_part(parameter, whole))
