"""LoRA+: B learns faster than A, by a fixed ratio (Hayou et al. 2024, https://arxiv.org/abs/2402.12354)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from luthier.adapters.experts import adapted
from luthier.config import LoraConfig

Rates = Callable[[str, torch.Tensor, float], float]
"""Name of a parameter, the parameter, the run's learning rate -> its own."""


def learning_rates(model: Any, config: Any) -> Rates | None:
    """The learning rates of LoRA+, as PEFT groups them.

    Every B and every vector that trains (DoRA's lengths, norms) learns faster by the ratio; both matrices beside an
    embedding have a rate of their own.

    Args:
        model: adapters in place.
        config: the key `adapter` of a run.

    Returns:
        None where all learn at one rate.
    """
    if not isinstance(config, LoraConfig) or config.learning_rate_ratio is None:
        return None
    ratio, slow = config.learning_rate_ratio, config.embedding_learning_rate
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tables = tuple(f"{name}.lora_" for name, _ in adapted(model) if name in embeddings)

    def rate(name: str, parameter: torch.Tensor, own: float) -> float:
        if name.startswith(tables):
            return slow
        return own * ratio if ".lora_B." in name or parameter.ndim == 1 else own

    return rate
