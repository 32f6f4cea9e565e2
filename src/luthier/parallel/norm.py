"""The gradient norm: one number over all parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """2-norm of all gradients laid end to end.

    Args:
        parameters: each once; those without a gradient count as 0.

    Returns:
        float64 scalar, on the host's CPU when there are no gradients. NaN or infinite when a gradient is.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # Norms in the gradient's own dtype lose digits in bf16; vector_norm widens inside its one pass over memory.
    widest = [torch.float64 if g.dtype == torch.float64 else torch.float32 for g in gradients]
    norms = [torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(gradients, widest, strict=True)]
    return torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
