"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from luthier.errors import ModelError

Policy = Literal["off", "full", "selective"]


def checkpoint_activations(model: Any, layers: Sequence[str], policy: Policy) -> int:
    """Make decoder layers recompute in the backward pass.

    Args:
        model: a Transformers model.
        layers: names of the decoder layers, in order.
        policy: "full" recomputes every layer, "selective" every second one, "off" none.

    Returns:
        how many layers recompute.

    Raises:
        ModelError: the architecture cannot recompute its layers.
    """
    if policy == "off":
        return 0
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no activation checkpointing",
            where="train.activation_checkpointing",
            remedy="set it to off",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = [model.get_submodule(name) for name in layers]
    stride = 2 if policy == "selective" else 1
    for number, block in enumerate(blocks):
        if number % stride and hasattr(block, "gradient_checkpointing"):
            block.gradient_checkpointing = False
    return len(blocks[::stride])
