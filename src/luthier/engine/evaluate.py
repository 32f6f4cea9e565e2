"""Token-weighted loss and perplexity of a model over rows, each row once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from luthier.batch import Batch
from luthier.engine.network import Network, counted, whole
from luthier.engine.prefixes import Shared, laid, read_off, shared_of
from luthier.hf.forward import hidden_states
from luthier.parallel.fsdp import within


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

    @property
    def metrics(self) -> dict[str, float]:
        """What is reported of it, by name."""
        return {"loss": self.loss, "perplexity": self.perplexity, "tokens": self.trained_tokens}


def batch_logprobs(network: Network, batch: Batch) -> torch.Tensor:
    """`logprobs_of` a single microbatch."""
    return logprobs_of(network, [batch])[0]


@torch.no_grad()
def logprobs_of(network: Network, batches: Sequence[Batch], *, share_prefixes: bool = False) -> list[torch.Tensor]:
    """Log-probabilities of the targets of some microbatches, without gradients; on a layout all ranks call it.

    Args:
        network: its model in whatever mode it is.
        batches: on any device. Through a pipeline several pass at a time.
        share_prefixes: run what the documents of a row begin with once, where this model can (`prefixes.py`).

    Returns:
        [T] of each, or [T, K], in fp32 or wider, 0 at positions without any weight.
    """
    ways = shared_of(network, batches, share_prefixes)
    here = [batch.to(network.device) for batch in batches]
    pairs = list(zip(here, ways, strict=True))
    if network.pipeline is None:
        return [within(network.model, _logprobs, network, batch, way) for batch, way in pairs]

    def score(hidden: torch.Tensor, row: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, way = pairs[number]
        values = _score(network, *read_off(hidden, row, batch, way), batch)
        return values.sum(), values

    return [logprobs for _, logprobs in network.pipeline.forward([laid(network, *pair) for pair in pairs], score)]


def _logprobs(network: Network, batch: Batch, way: Shared | None) -> torch.Tensor:
    if network.mesh is None and not batch.weights.any():
        return torch.zeros(batch.targets.shape[1:], dtype=network.head.dtype, device=batch.input_ids.device)
    row = laid(network, batch, way)
    return _score(network, *read_off(hidden_states(network.model, row), row, batch, way), batch)


def _score(network: Network, hidden: torch.Tensor, row: Batch, batch: Batch) -> torch.Tensor:
    """[T] of a batch from the hidden states of its row, or of this rank's part of it."""
    head = network.head
    chosen = counted(row)  # [n]
    values = torch.zeros(row.targets.shape[1:], dtype=head.dtype, device=row.input_ids.device)
    if chosen.numel():
        values[chosen] = head.logprobs(hidden[chosen], row.targets[0, chosen].clamp(min=0)).to(head.dtype)
    elif network.mesh is not None:  # its weights are everybody's: take part
        head.logprobs(hidden[:1], row.targets[0, :1].clamp(min=0))
    return whole(network, values, batch)


@torch.no_grad()
def evaluate(
    network: Network, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
) -> Evaluation:
    """Measure a model on batches that together hold every row once.

    Sums are taken in float64 over single tokens, so how rows are batched changes nothing but rounding inside the model.

    Args:
        network: its model is put into evaluation mode meanwhile (no dropout), and back.
        batches: microbatches with the rows' own weights (not divided by anything); on a layout this data rank's part,
            equally many on every rank.
        progress: called with the rows done so far.

    Returns:
        of all rows, the same on every rank.

    Raises:
        DataError: a row holds what the model cannot read.
    """
    model = network.model
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64)  # loss, weight, rows, tokens, trained tokens
    try:
        remaining = iter(batches)
        together = 1 if network.pipeline is None else 4 * network.pipeline.ranks  # so that most stages are busy
        while group := list(islice(remaining, together)):
            if network.limits is not None:
                for batch in group:
                    network.limits.check(batch)
            for batch, logprobs in zip(group, logprobs_of(network, group), strict=True):
                loss = -float((logprobs.double().cpu() * batch.weights[0].cpu()).sum())
                if batch.trained_tokens or batch.tokens > 1:  # not the single position of a rank that just takes part
                    counts = [batch.total_weight, batch.documents, batch.tokens, batch.trained_tokens]
                    sums += torch.tensor([loss, *counts], dtype=torch.float64)
            if progress is not None:
                progress(int(sums[2]))
    finally:
        model.train(was_training)
    if network.mesh is not None:
        sums = network.mesh.sum(sums.to(network.device)).cpu()
    loss, weight, rows, tokens, trained = sums.tolist()
    mean = loss / weight if weight else math.nan
    return Evaluation(mean, math.exp(mean) if mean < 700 else math.inf, int(rows), int(tokens), int(trained))
