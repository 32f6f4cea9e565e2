"""First values that are a part of the base weight, which is taken out of it: W - s B A stays frozen, s B A trains.

PiSSA takes the largest singular values (Meng et al. 2024, https://arxiv.org/abs/2404.02948), OLoRA the first columns of
an orthogonal basis (Büyükakyüz 2024, https://arxiv.org/abs/2406.01775). A layer remembers what it began with, so that
what training made of it can be written as an ordinary adapter of twice the rank for the base as it was:
s B A - s B0 A0 = s [B, -B0] [A; A0].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from luthier.errors import ConfigError
from luthier.hf.gather import coordinate_of, gather, local_part
from luthier.hf.nf4 import Nf4Weight
from luthier.hf.shards import fill, own_part

if TYPE_CHECKING:
    from luthier.adapters.layer import LoraLayer, LoraSpec


def takes_from_base(init: str) -> bool:
    """Whether `adapter.init` changes base weights."""
    return init == "olora" or init.startswith("pissa")


def principal_part(
    weight: Tensor, rank: int, scale: float, init: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A and B whose product, times the scale, is a part of a weight.

    Args:
        weight: [outputs, inputs], float32 or float64.
        rank: of the part, at most the smaller side.
        scale: by which the product will be multiplied.
        init: pissa, pissa_niter_N (N rounds of a randomised SVD instead of the exact one) or olora.
        generator: of the randomised SVD.

    Returns:
        A [rank, inputs] and B [outputs, rank], as PEFT has them, and of every singular vector the sign by which the
        largest entry of B's column is positive.
    """
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if init == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    else:
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            left, values, vectors = torch.svd_lowrank(weight, q=rank, niter=int(init.rpartition("_")[2]))
        right = vectors.t()
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    root = (values / scale).sqrt()
    # LAPACK's columns lie end to end, and what is sent to other ranks must not
    return (root[:, None] * right * signs.t()).contiguous(), (left * root * signs).contiguous()


@torch.no_grad()
def take_from_base(layer: LoraLayer, name: str, init: str, generator: torch.Generator, turn: int) -> None:
    """Let a layer begin with a part of its base weight. All ranks that hold parts of the weight call this.

    Args:
        layer: adapted, its weight in place.
        name: full name, for messages.
        init: pissa, pissa_niter_N or olora.
        generator: of the randomised SVD.
        turn: number of the layer: on a layout the ranks factorise in turn, each a whole weight at a time.

    Raises:
        ConfigError: the weight is too small, or holds no plain numbers.
    """
    rank, transposed = layer.lora_spec.rank, layer.lora_shape.transposed
    smallest = min(layer.lora_shape.inputs, layer.lora_shape.outputs)
    if rank > smallest:
        raise ConfigError(f"{name} has no {rank} directions to take, but {smallest}", where="adapter.rank")
    weight = layer.weight
    if isinstance(local_part(weight), Nf4Weight):
        what = f"the weight of {name} is quantised, and its largest part cannot be taken out of it"
        raise ConfigError(what, where="adapter.init", remedy="leave it out, or take loftq")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scale = layer.lora_spec.scale
    with one_thread():  # whose sums do not depend on the machine, so that a run that goes on has the very same base
        whole, ranks = _whole(weight, turn)
        sizes = ((rank, layer.lora_shape.inputs), (layer.lora_shape.outputs, rank))
        if whole is not None:
            rows = whole.t() if transposed else whole
            down, up = principal_part(rows.to(dtype).contiguous(), rank, scale, init, generator)
        else:
            device = torch.device(weight.device.type if not isinstance(weight, DTensor) else _device(weight))
            down, up = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        if isinstance(weight, DTensor):
            for part in (down, up):
                _spread(part, weight, ranks[turn % len(ranks)])
        # what is taken out is what the adapter holds, rounded to its dtype
        down, up = (part.to(layer.lora_A.weight.dtype) for part in (down, up))
        product = scale * (up.to(dtype) @ down.to(dtype))
    local = local_part(weight)
    taken = own_part(weight, product.t().contiguous() if transposed else product).to(local.device)
    local.copy_(local.to(dtype) - taken)
    for place, value in ((layer.lora_A.weight, down), (layer.lora_B.weight, up)):
        fill(place, value.to(local_part(place).device))
    layer.lora_first = (layer.lora_A.weight.detach().clone(), layer.lora_B.weight.detach().clone())


def _device(weight: DTensor) -> torch.device:
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _whole(weight: Tensor, turn: int) -> tuple[Tensor | None, Sequence[int]]:
    """The whole weight on the rank whose turn it is, and the ranks that take turns."""
    if not isinstance(weight, DTensor):
        return weight.detach(), ()
    ranks = weight.device_mesh.mesh.flatten().tolist()
    whole = gather(weight, ranks[turn % len(ranks)])
    return None if whole is None else whole.to(_device(weight)), ranks


def _spread(part: Tensor, weight: DTensor, source: int) -> None:
    """Give all ranks of a weight's mesh what one of them has: along its last dimension first, then along the others."""
    mesh = weight.device_mesh
    here, there = coordinate_of(weight, dist.get_rank()), coordinate_of(weight, source)
    assert here is not None
    assert there is not None
    for index in range(mesh.ndim):
        if here[index + 1 :] == there[index + 1 :]:
            place = [*here[:index], there[index], *here[index + 1 :]]
            dist.broadcast(part, int(mesh.mesh[tuple(place)]), group=mesh.get_group(index))


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within, so that sums are those of any machine with as many bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def filed_spec(layer: Any) -> LoraSpec:
    """How a layer is adapted as PEFT's files tell it, for the base as it was: of twice the rank where a part was taken
    from the base, and of the same scale."""
    spec: LoraSpec = layer.lora_spec
    if getattr(layer, "lora_first", None) is None:
        return spec
    more = math.sqrt(2) if spec.rslora else 2
    return dataclasses.replace(spec, rank=2 * spec.rank, alpha=spec.alpha * more)
