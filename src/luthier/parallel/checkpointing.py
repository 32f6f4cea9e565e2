"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from typing import Any, Literal

from luthier.errors import ModelError

Policy = Literal["off", "full", "selective"]


def checkpoint_activations(model: Any, policy: Policy) -> None:
    """Make decoder layers recompute in the backward pass.

    Args:
        model: a Transformers model.
        policy: "full" recomputes every layer, "selective" every second one, "off" none.

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
