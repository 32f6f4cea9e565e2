"""First values of the adapters: by default A random, B zero, so that an adapted model starts as exactly its base.

Each A is drawn whole, in float32 on the CPU, from a stream of its own that depends on the seed and the layer's full
name alone: the same numbers on every device, dtype and layout, and whatever else is adapted.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from luthier.adapters.dora import initialise_magnitude
from luthier.adapters.embedding import LoraEmbedding
from luthier.adapters.experts import Adapted, ExpertsAdapter, adapted
from luthier.adapters.layer import LoraLayer
from luthier.adapters.loftq import rounds_of, started
from luthier.adapters.principal import take_from_base, takes_from_base
from luthier.hf.shards import fill


def stream(name: str, seed: int) -> torch.Generator:
    """Random numbers of one layer, whatever else there is."""
    digest = hashlib.sha256(f"{seed}:{name}:lora_A".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def first_down(rank: int, inputs: int, name: str, seed: int, experts: int | None = None) -> Tensor:
    """A of one layer: uniform within 1/sqrt(inputs), which is PEFT's kaiming_uniform_(a=sqrt(5)).

    Args:
        rank: rows.
        inputs: columns.
        name: full name of the adapted layer.
        seed: of the run.
        experts: of a matrix that every expert has; each gets an A of its own.

    Returns:
        float32 [rank, inputs] on the CPU, or [experts, rank, inputs].
    """
    bound = 1.0 / math.sqrt(inputs)
    shape = (rank, inputs) if experts is None else (experts, rank, inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=stream(name, seed))


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int, init: str = "default") -> None:
    """Give every adapter its first values; call it after loading, which leaves them with whatever it likes.

    Args:
        model: adapters attached, nothing on meta; what this rank holds of it.
        seed: of the run.
        init: `adapter.init`.
    """
    for turn, (name, layer) in enumerate(adapted(model)):
        if not isinstance(layer, ExpertsAdapter) and layer.lora_spec.dora:
            initialise_magnitude(layer)
        if takes_from_base(init):
            assert isinstance(layer, LoraLayer)
            take_from_base(layer, name, init, stream(name, seed), turn)
            continue
        if rounds_of(init):
            assert isinstance(layer, LoraLayer)
            for place, value in zip((layer.lora_A.weight, layer.lora_B.weight), started(layer), strict=True):
                fill(place, value.to(place.dtype))
            continue
        down, up = first_values(name, layer, seed, init)
        fill(layer.lora_A.weight, down)
        if up is None:
            layer.lora_B.weight.zero_()
        else:
            fill(layer.lora_B.weight, up)


def first_values(name: str, layer: Adapted, seed: int, init: str = "default") -> tuple[Tensor, Tensor | None]:
    """A and B of one layer, as PEFT draws them.

    Args:
        name: full name.
        layer: adapted.
        seed: of the run.
        init: default (A uniform), gaussian (A of deviation 1 / rank) or orthogonal (both, with B A = 0).

    Returns:
        float32 on the CPU; None for a B of zeros. Beside a table of tokens A is zero, and B normal.
    """
    rank, shape = layer.lora_spec.rank, layer.lora_shape
    experts = layer.lora_shape.experts if isinstance(layer, ExpertsAdapter) else None
    if isinstance(layer, LoraEmbedding):
        return torch.zeros(rank, shape.inputs), torch.empty(shape.outputs, rank).normal_(generator=stream(name, seed))
    if init == "gaussian":
        size = (rank, shape.inputs) if experts is None else (experts, rank, shape.inputs)
        return torch.empty(size).normal_(std=1 / rank, generator=stream(name, seed)), None
    if init == "orthogonal":
        return orthogonal(rank, shape.inputs, shape.outputs, stream(name, seed))
    return first_down(rank, shape.inputs, name, seed, experts), None


def orthogonal(rank: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A and B that each use half of an orthogonal basis, so that B A = 0 though neither is.

    Args:
        rank: even.
        inputs: of A [rank, inputs].
        outputs: of B [outputs, rank].
        generator: of the basis, and of both.
    """
    basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    down = torch.randn(inputs, rank // 2, generator=generator).mm(basis[0::2]).t() / 10
    up = torch.randn(rank // 2, outputs, generator=generator).t().mm(basis[1::2]) / 10
    return down, up
