"""Plain weights that are what NF4 makes of others, by bitsandbytes alone, and PEFT's LoftQ on the CPU."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional as bnb
from peft.utils import loftq_utils
from transformers.pytorch_utils import Conv1D

from tests.oracles.plain import plain_model


@torch.no_grad()
def dequantised(base: Path, directory: Path, *, double: bool) -> Path:
    """A plain model in float64 whose linear layers, but for the head, hold what their codes stand for.

    Args:
        base: of the weights that are quantised as Transformers does: a transposed layer's, [inputs, outputs], turned.
        directory: where it is saved.
        double: whether the scales are quantised too.
    """
    model = plain_model(base, torch.float64)
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or module is model.get_output_embeddings():
            continue
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        codes, state = bnb.quantize_4bit(
            weight.float().contiguous(), blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        weight.copy_(bnb.dequantize_4bit(codes, state))
    model.save_pretrained(directory)
    return directory


def pefts_loftq() -> Any:
    """PEFT's own function, which names the GPU; the word is changed, and nothing else."""
    source = inspect.getsource(loftq_utils.loftq_init).replace('"cuda"', '"cpu"')
    place = dict(vars(loftq_utils))
    exec(source, place)
    return place["loftq_init"]
