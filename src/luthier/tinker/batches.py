"""Rows laid into microbatches, what was found for these given back row by row, and what a call tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from luthier.batch import NO_TOKEN, Batch
from luthier.data.packing import microbatches
from luthier.engine.network import Network
from luthier.engine.step import LossFunction
from luthier.hf.together import exchange
from luthier.losses.policy import weighted_cross_entropy
from luthier.losses.table import TARGETS, WEIGHTS, Loss
from luthier.tinker.rows import Row
from luthier.tinker.types import ForwardBackwardOutput, TensorData


def _nothing(row: Row) -> torch.Tensor:
    return torch.zeros(row.targets.shape)


class Batches:
    """The microbatches of a call; on a layout those of this data rank, equally many on each.

    Args:
        rows: of the call; every rank has them all.
        tokens: most positions of a microbatch, unless a row is longer.
        network: what runs them.
        weights: what to weigh each row's targets with, float64 in their shape.
    """

    def __init__(
        self, rows: Sequence[Row], tokens: int, network: Network, weights: Callable[[Row], torch.Tensor]
    ) -> None:
        self._rows = rows
        self._network = network
        self._indices = [number for number, row in enumerate(rows) if len(row.tokens)]
        lengths = [len(rows[number].tokens) for number in self._indices]
        mesh = network.mesh
        ranks, rank = (mesh.data_ranks, mesh.data_rank) if mesh is not None else (1, 0)
        longest = max([tokens, *lengths])
        dealt = microbatches(lengths, longest, not network.packing_fault, ranks)[rank] if lengths else []
        self._bins = [[self._indices[place] for place in bin_] for bin_ in dealt]
        self._width = max((row.targets.shape[1] for row in rows if row.targets.dim() == 2), default=None)
        self.batches = [self._lay([rows[number] for number in numbers], weights) for numbers in self._bins]

    def by_row(self, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What was found for each microbatch ([T] or [T, K]), cut back to the shape of each row's targets.

        On a layout all ranks call it, and all get everything.
        """
        own: dict[int, torch.Tensor] = {}
        for numbers, values in zip(self._bins, found, strict=True):
            start = 0
            for number in numbers:
                row = self._rows[number]
                stop = start + len(row.tokens)
                part = values[start:stop].cpu()
                if self._width is not None:
                    part = part[:, : row.targets.shape[1]] if row.targets.dim() == 2 else part[:, 0]
                own[number] = part
                start = stop
        group = dist.group.WORLD if self._network.mesh is not None else None
        everything = {number: values for other in exchange(own, group) for number, values in other.items()}
        dtype = self._network.head.dtype
        none = {number: torch.zeros(row.targets.shape, dtype=dtype) for number, row in enumerate(self._rows)}
        return list((none | everything).values())

    def _lay(self, rows: Sequence[Row], weights: Callable[[Row], torch.Tensor]) -> Batch:
        """Rows end to end; without any, a single position of weight 0 for a rank that has to take part."""
        if not rows:
            first = self._rows[self._indices[0]]
            one = {key: torch.zeros_like(values[:1]) for key, values in first.fields.items()}
            one[TARGETS] = torch.full_like(first.targets[:1], NO_TOKEN)
            rows = [Row(torch.zeros(1, dtype=torch.int64), one, "")]
            weights = _nothing
        lengths = torch.tensor([len(row.tokens) for row in rows])
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Batch(
            input_ids=torch.cat([row.tokens for row in rows])[None],
            position_ids=torch.cat([torch.arange(int(length)) for length in lengths])[None],
            targets=torch.cat([self._wide(row.targets, NO_TOKEN) for row in rows])[None],
            weights=torch.cat([self._wide(weights(row).double(), 0) for row in rows])[None],
            cu_seqlens=bounds.to(torch.int32),
            origins=tuple(row.where for row in rows),
            inputs={
                key: torch.cat([row.fields[key].to(self._network.head.dtype) for row in rows])
                for key in rows[0].fields
                if key != TARGETS and self._width is None
            },
        )

    def _wide(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """[T] or [T, K] as it is, or where a row of the call has several targets [T, most of them]."""
        if self._width is None:
            return values
        values = values[:, None] if values.dim() == 1 else values
        return torch.nn.functional.pad(values, (0, self._width - values.shape[1]), value=fill)


def own_loss(loss: Loss, settings: Mapping[str, float], *, soft: bool) -> LossFunction | None:
    """The loss as the step takes it; None for plain cross-entropy, whose gradient the head makes on the way."""
    if loss.soft:
        return (lambda logprobs, batch: weighted_cross_entropy(logprobs, batch.weights[0])) if soft else None

    def value(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return loss.value(logprobs, batch.inputs, batch.cu_seqlens, settings)

    return value


def output_of(
    rows: Sequence[Row], loss: Loss, settings: Mapping[str, float], logprobs: Sequence[torch.Tensor]
) -> ForwardBackwardOutput:
    """What a call tells: the loss of its own rows, summed in float64 row by row, so that batching changes nothing."""
    total, valid = 0.0, 0
    is_mean = loss.soft and not rows[0].has_weights
    for row, values in zip(rows, logprobs, strict=True):
        there = row.targets != NO_TOKEN
        valid += int(there.sum())
        fields = row.fields | ({WEIGHTS: there.double()} if is_mean else {})
        read = {key: field.to(values.dtype) for key, field in fields.items() if key != TARGETS}
        total += float(loss.value(values, read, torch.tensor([0, len(row.tokens)]), settings))
    metrics = {"loss:sum": total, "tokens:sum": float(valid)}
    if is_mean:
        metrics["loss:mean"] = total / valid if valid else 0.0
    outputs = [{"logprobs": TensorData(values)} for values in logprobs]
    return ForwardBackwardOutput(outputs, metrics, metrics.get("loss:mean", total))
