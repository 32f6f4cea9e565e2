"""Gradients of bf16 weights are summed over ranks and microbatches in fp32, and stay so."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from luthier.parallel.fsdp import shard
from tests.world import World


def sums() -> bool:
    """On every rank: two backward passes through a sharded layer, and those of both ranks through a copy of it."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 6, dtype=torch.bfloat16))
    sharded = nn.Sequential(nn.Linear(8, 6, dtype=torch.bfloat16))
    sharded.load_state_dict(whole.state_dict())
    shard(sharded, list(sharded), init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    inputs = torch.randn(2, 2, 5, 8).bfloat16()  # [microbatch, rank, position, width]
    expected = {name: torch.zeros(p.shape) for name, p in whole.named_parameters()}
    for microbatch in inputs:
        sharded(microbatch[dist.get_rank()]).float().square().sum().backward()
        for part in microbatch:
            whole.zero_grad()
            whole(part).float().square().sum().backward()
            for name, parameter in whole.named_parameters():
                assert parameter.grad is not None
                expected[name] += parameter.grad.float()
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-6, atol=0)
    return True


def test_gradients_of_bf16_weights_stay_in_fp32(world: Callable[[int], World]) -> None:
    assert world(2).run(sums) == [True, True]
