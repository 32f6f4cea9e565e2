"""First values of the adapters: A random, B zero, so that an adapted model starts as exactly its base.

Each A is drawn whole, in float32 on the CPU, from a stream of its own that depends on the seed and the layer's full
name alone: the same numbers on every device, dtype and layout, and whatever else is adapted.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from luthier.adapters.dora import initialise_magnitude
from luthier.adapters.experts import ExpertsAdapter, adapted
from luthier.adapters.layer import LoraLayer
from luthier.hf.shards import fill


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
    digest = hashlib.sha256(f"{seed}:{name}:lora_A".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(inputs)
    shape = (rank, inputs) if experts is None else (experts, rank, inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """Give every adapter its first values; call it after loading, which leaves them with whatever it likes.

    Args:
        model: adapters attached, nothing on meta.
        seed: of the run.
    """
    for name, layer in adapted(model):
        down, up = layer.lora_A.weight, layer.lora_B.weight
        experts = layer.lora_shape.experts if isinstance(layer, ExpertsAdapter) else None
        fill(down, first_down(layer.lora_spec.rank, layer.lora_shape.inputs, name, seed, experts))
        up.zero_()
        if isinstance(layer, LoraLayer) and layer.lora_spec.dora:
            initialise_magnitude(layer)
