"""The gradient norm: one number over all parameters of a model, the same on every rank and on every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from luthier.hf.gather import local_part
from luthier.parallel.mesh import Mesh


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Sum up gradients that lie in parts: those of a replicated weight whose ranks each saw a part of its use.

    Under FSDP this has happened while gradients were reduced. Called once a step on all ranks, after the last backward
    pass: doing it in each one would sum what is summed already.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh | None = None) -> torch.Tensor:
    """2-norm of all gradients laid end to end.

    Args:
        parameters: each once; those without a gradient count as 0.
        mesh: of a run on several ranks, all of which call this; each counts what it holds, a copy as its share.

    Returns:
        float64 scalar, on the host's CPU when there are no gradients. NaN or infinite when a gradient is.
    """
    return norm_of([square(p.grad, mesh) for p in parameters if p.grad is not None], mesh)


def square(gradient: torch.Tensor, mesh: Mesh | None = None) -> torch.Tensor:
    """The square of a gradient's 2-norm, of which every rank counts what it holds, a copy as its share.

    Returns:
        float64 scalar.
    """
    share = 1.0 if mesh is None else _distinct(gradient) / mesh.stage_ranks
    local = local_part(gradient)
    # Norms in the gradient's own dtype lose digits in bf16; vector_norm widens inside its one pass over memory.
    widest = torch.float64 if local.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(local, dtype=widest).double().square() * share


def norm_of(squares: Sequence[torch.Tensor], mesh: Mesh | None = None) -> torch.Tensor:
    """2-norm from the squares that `square` gave, on several ranks of all of them, which all call it."""
    total = torch.stack(list(squares)).sum() if squares else torch.zeros((), dtype=torch.float64)
    if mesh is None:
        return total.sqrt()
    total = total.to(mesh.device)
    dist.all_reduce(total)
    return total.sqrt()


def _distinct(gradient: torch.Tensor) -> int:
    """How many ranks of a stage hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = [
        gradient.device_mesh.size(index)
        for index, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    ]
    return math.prod(sizes)
