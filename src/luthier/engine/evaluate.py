"""Token-weighted loss and perplexity of a model over rows, each row once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from luthier.batch import Batch
from luthier.engine.logprobs import Head
from luthier.hf.forward import hidden_states
from luthier.hf.limits import limits_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        loss: sum of weight x (-log p) / sum of weights, nats a token.
        perplexity: exp(loss).
        rows: how many rows.
        tokens: how many positions the model read.
        trained_tokens: how many of them counted.
    """

    loss: float
    perplexity: float
    rows: int
    tokens: int
    trained_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def batch_logprobs(model: Any, head: Head, batch: Batch) -> torch.Tensor:
    """Log-probabilities of a microbatch's targets, without gradients.

    Args:
        model: in whatever mode it is.
        head: the model's head.
        batch: on the model's device.

    Returns:
        [T] in fp32 or wider, 0 where the weight is 0.
    """
    chosen = batch.weights[0].nonzero().squeeze(-1)  # [n]
    values = torch.zeros(batch.tokens, dtype=head.dtype, device=batch.input_ids.device)
    if chosen.numel():
        values[chosen] = head.logprobs(hidden_states(model, batch)[chosen], batch.targets[0, chosen])
    return values


@torch.no_grad()
def evaluate(
    model: Any,
    head: Head,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Measure a model on batches that together hold every row once.

    Sums are taken in float64 over single tokens, so how rows are batched changes nothing but rounding inside the model.

    Args:
        model: put into evaluation mode meanwhile (no dropout), and back.
        head: the model's head.
        batches: microbatches with the rows' own weights (not divided by anything).
        device: where the model is.
        progress: called with the rows done so far.

    Raises:
        DataError: a row holds what the model cannot read.
    """
    limits = limits_of(model)
    was_training = model.training
    model.eval()
    loss = weight = 0.0
    rows = tokens = trained = 0
    try:
        for cpu_batch in batches:
            limits.check(cpu_batch)
            batch = cpu_batch.to(device)
            loss -= float((batch_logprobs(model, head, batch).double() * batch.weights[0]).sum())
            weight += batch.total_weight
            rows += batch.documents
            tokens += batch.tokens
            trained += batch.trained_tokens
            if progress is not None:
                progress(rows)
    finally:
        model.train(was_training)
    mean = loss / weight if weight else math.nan
    return Evaluation(mean, math.exp(mean) if mean < 700 else math.inf, rows, tokens, trained)
