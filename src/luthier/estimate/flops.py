"""Operations of a step on one rank, and what of them is useful.

What a model needs is counted by `report/flops.py`, as training reports it. A rank computes its share of that, and once
more the layers that are recomputed, which is work but no use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from luthier.estimate.plan import AGAIN, Held, Plan
from luthier.estimate.shape import LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one rank for one microbatch.

    Attributes:
        forward: of its layers and its head.
        backward: of the same.
        recomputed: of layers that run forward twice.
    """

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


def useful(shape: ModelShape, plan: Plan, *, backward: bool = True) -> float:
    """Operations that a step of all ranks needs: active experts, attention by the length of documents, frozen weights
    without a gradient of their own; nothing twice.

    Args:
        shape: the model.
        plan: layout and batch.
        backward: count the backward pass too.
    """
    row = plan.row_tokens * (shape.head_forward + backward * shape.head_backward)
    for layer, count in Counter(shape.layers).items():
        row += count * (_forward(layer, plan) + backward * _backward(layer, plan))
    return float(row * plan.microbatches * plan.layout.data_ranks)


def work(shape: ModelShape, plan: Plan, held: Held) -> Work:
    """Operations of one rank for one microbatch; ranks of tp and cp share them evenly."""
    parts = plan.layout.tp * plan.layout.cp
    forward = held.sum(lambda layer: _forward(layer, plan))
    backward = held.sum(lambda layer: _backward(layer, plan))
    again = AGAIN[plan.checkpointing] * forward
    if held.last:
        forward += plan.row_tokens * shape.head_forward
        backward += plan.row_tokens * shape.head_backward
    return Work(forward / parts, backward / parts, again / parts)


def _forward(layer: LayerShape, plan: Plan) -> int:
    seen = plan.rows * layer.flops.attention.forward(plan.length) if layer.flops.attention is not None else 0
    return plan.row_tokens * layer.flops.forward + seen


def _backward(layer: LayerShape, plan: Plan) -> int:
    attention = layer.flops.attention
    seen = 2 * plan.rows * attention.forward(plan.length) if attention is not None and attention.backward else 0
    return plan.row_tokens * layer.flops.backward + seen
