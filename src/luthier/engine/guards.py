"""What is not finite, by name: the step, the rows and the first tensor at fault."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from luthier.batch import Batch
from luthier.engine.state import TrainState
from luthier.errors import NonFiniteError


def first_bad_gradient(state: TrainState) -> str | None:
    """Name of the first trained parameter whose gradient holds a NaN or infinity."""
    for name, parameter in state.trainable.items():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    return None


def first_bad_weight(state: TrainState) -> str | None:
    """Name of the first parameter that itself holds a NaN or infinity."""
    for name, parameter in state.model.named_parameters():
        if not torch.isfinite(parameter).all():
            return name
    return None


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
    step: int, *, loss: float, norm: float | None, tensor: str | None, weight: str | None, rows: Sequence[str]
) -> NonFiniteError:
    """The error that stops a run."""
    what = f"the loss is {loss}" if loss != loss or abs(loss) == float("inf") else f"the gradient norm is {norm}"
    if weight is not None:
        what += f"; the weight {weight} is not finite itself"
    elif tensor is not None:
        what += f"; the first gradient that is not finite is that of {tensor}"
    if rows:
        shown = ", ".join(rows[:8])
        what += f"; rows {shown}" + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    return NonFiniteError(
        what,
        where=f"step {step}",
        remedy="lower optimizer.learning_rate, look at these rows with `luthier data show`, or set train.on_non_finite=skip",
    )
