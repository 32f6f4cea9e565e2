"""The reference: one process of unmodified Transformers, each document alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from luthier.batch import Sample


@dataclass
class Reference:
    """Loss, gradients and log-probabilities that plain Transformers gives."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logprobs: list[torch.Tensor] = field(default_factory=list)


def plain_model(path: str | Path, dtype: torch.dtype, **arguments: Any) -> Any:
    """An unmodified model. float64 needs the plain expert loop, since grouped products refuse it."""
    if dtype == torch.float64:
        arguments.setdefault("experts_implementation", "eager")
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments)


def weighted_sum(model: Any, samples: Sequence[Sample], factor: float = 1.0) -> Reference:
    """Sum of factor x weight x cross-entropy over documents, each run alone; gradients of what trains."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    logprobs = []
    for sample in samples:
        ids = torch.from_numpy(sample.tokens)[None]
        targets = torch.from_numpy(sample.targets)
        logits = model(input_ids=ids, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide, targets, reduction="none")
        weights = torch.from_numpy(sample.weights).to(wide.dtype) * factor
        loss = (losses * weights).sum()
        loss.backward()
        total += float(loss.detach())
        logprobs.append(-losses.detach())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Reference(total, gradients, logprobs)


def save_strong(config: Any, directory: Path, scale: float = 1.0, seed: int = 0) -> Path:
    """A random model with weights so large that faults of masks, caps and positions show in the numbers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    model.save_pretrained(directory)
    return directory


def gradient_errors(
    ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], tiny: float = 1e-13
) -> dict[str, float]:
    """Per tensor, largest difference / largest entry; gradients that are zero in exact arithmetic, absolutely."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    biggest = max(float(g.abs().max()) for g in reference.values())
    errors = {}
    for name, expected in reference.items():
        difference = float((ours[name].double() - expected.double()).abs().max())
        size = float(expected.abs().max())
        errors[name] = difference / (size if size > tiny * biggest else biggest)
    return errors


def gradient_error(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The worst of `gradient_errors`."""
    return max(gradient_errors(ours, reference).values())
