"""What is not finite, by name: the step, the rows and the first tensor at fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from luthier.batch import Batch
from luthier.errors import NonFiniteError
from luthier.hf.gather import local_part


def first_bad_gradient(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Name of the first parameter whose gradient holds a NaN or infinity."""
    return next((n for n, p in parameters.items() if p.grad is not None and not _finite(p.grad)), None)


def first_bad_weight(model: nn.Module) -> str | None:
    """Name of the first parameter that itself holds a NaN or infinity."""
    return next((n for n, p in model.named_parameters() if not _finite(p)), None)


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all that this rank holds of a tensor is finite; asks no other rank."""
    return bool(torch.isfinite(local_part(tensor)).all())


def bad_rows(batch: Batch, logprobs: torch.Tensor) -> list[str]:
    """Origins of the documents of a microbatch that have a log-probability which is not finite.

    Args:
        batch: the microbatch.
        logprobs: [T] as `forward_backward` returned them.
    """
    bounds = batch.cu_seqlens.tolist()
    finite = torch.isfinite(logprobs).cpu()
    return [
        origin
        for origin, start, stop in zip(batch.origins, bounds, bounds[1:], strict=False)
        if not finite[start:stop].all()
    ]


def non_finite_error(
    step: int, *, loss: float, norm: float, gradient: str | None, weight: str | None, rows: Sequence[str]
) -> NonFiniteError:
    """The error that stops a run.

    Args:
        step: counted from 1.
        loss: of the step.
        norm: of its gradients.
        gradient: first parameter with a gradient that is not finite.
        weight: first parameter that is not finite itself.
        rows: origins of the documents whose log-probabilities are not finite.
    """
    what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    if weight is not None:
        what += f", the weight {weight} itself is not finite"
    elif gradient is not None:
        what += f", the first gradient that is not finite is that of {gradient}"
    if rows:
        shown = ", ".join(rows[:8])
        what += f", in rows {shown}" + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    return NonFiniteError(
        what,
        where=f"step {step}",
        remedy="lower optimizer.learning_rate, look at the rows (luthier data show), or set train.on_non_finite=skip",
    )
