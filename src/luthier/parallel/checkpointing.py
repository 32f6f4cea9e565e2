"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.graph import save_on_cpu

from luthier.errors import ModelError

Policy = Literal["off", "full", "selective", "offloaded"]


def checkpoint_activations(model: Any, policy: Policy) -> None:
    """Make decoder layers recompute in the backward pass.

    Args:
        model: a Transformers model.
        policy: "full" recomputes every layer and keeps its input, "offloaded" keeps the inputs in the host's memory,
            "selective" recomputes every second layer, "off" none.

    Raises:
        ModelError: the architecture cannot recompute its layers.
    """
    if policy == "off":
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no activation checkpointing",
            where="train.activation_checkpointing",
            remedy="set it to off",
        )
    every = 2 if policy == "selective" else 1
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    if policy == "offloaded":
        for module in model.modules():
            if "_gradient_checkpointing_func" in vars(module):
                module._gradient_checkpointing_func = _offloaded(module._gradient_checkpointing_func)


def _offloaded(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """The same recomputation, whose kept inputs wait in the host's memory.

    The hooks that torch's checkpointing puts around the layer itself lie within these, so they see the inputs alone.
    """

    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return recompute(function, *inputs)

    return run
