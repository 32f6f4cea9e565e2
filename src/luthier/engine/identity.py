"""What a checkpoint was taken of, in a few words that can be compared: a run must not go on with another model."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_SAMPLED = 64


@torch.no_grad()
def model_digest(model: Any) -> str:
    """Hash of a model's frozen and initial weights: every name, shape and dtype, and some values of each tensor.

    Evenly spaced values are read instead of all, so that a large model costs no second pass over its memory; two
    models that differ in nothing but a few unsampled numbers are taken for one.

    Args:
        model: adapters in place or not; adapter weights are left out.

    Returns:
        16 hex digits.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED)
        digest.update(flat[::stride][:_SAMPLED].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:16]
