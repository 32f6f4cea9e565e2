"""A model as sizes alone, so that a thousand layouts can be weighed in a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from luthier.parallel.layout import Layout
from luthier.report.operations import LayerFlops


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One parameter, whole.

    Attributes:
        name: within its layer, or full.
        shape: of the whole.
        itemsize: bytes an element; of a quantised weight, scales included, no whole number.
        gradient: bytes an element of its gradient; 0 where it is frozen.
        states: bytes of its optimizer states.
        cut: the dimension that tensor parallelism cuts; None where each of its ranks has the whole.
        expert: the first dimension is the experts (or their rows), which ep deals out.
        partial: of its gradient each rank of tp makes a part of the sum.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: float
    gradient: int
    states: int
    cut: int | None = None
    expert: bool = False
    partial: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def part(self, layout: Layout) -> tuple[int, ...]:
        """The shape that the first rank of tp or ep holds before FSDP shards it."""
        sizes = list(self.shape)
        if self.expert and layout.ep > 1:
            sizes[0] = -(-sizes[0] // layout.ep)
        elif self.cut is not None:
            sizes[self.cut] = -(-sizes[self.cut] // layout.tp)
        return tuple(sizes)

    def shards(self, layout: Layout) -> int:
        """Ranks that FSDP shards it over."""
        return layout.efsdp if self.expert and layout.ep > 1 else layout.fsdp

    def shard(self, layout: Layout) -> int:
        """Elements of one rank's shard; torch cuts the first dimension and pads it."""
        sizes = self.part(layout)
        if not sizes:
            return 1
        return -(-sizes[0] // self.shards(layout)) * math.prod(sizes[1:])


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of some weights on one rank, summed.

    Attributes:
        held: of the shards.
        gradients: of the gradients of the shards.
        states: of their optimizer states.
        trained: elements of the shards that train.
        trained_held: bytes of them.
        whole: of the weights once FSDP has gathered them.
        whole_gradients: of their gradients in the weights' dtype.
        sums: of their gradients in the dtype in which they are summed.
        expert_held, expert_gradients: what of the first two is of experts that ep deals out.
        parts: of gradients of which each rank of tp makes a part of the sum, in the weights' dtype.
        wide_parts: of the same, in their own.
    """

    held: int = 0
    gradients: int = 0
    states: float = 0.0
    trained: int = 0
    whole: int = 0
    whole_gradients: int = 0
    sums: int = 0
    expert_held: int = 0
    expert_gradients: int = 0
    parts: int = 0
    wide_parts: int = 0
    trained_held: int = 0


@lru_cache(maxsize=1 << 16)
def totals(weights: tuple[Weight, ...], layout: Layout) -> Totals:
    """Of a layer or a part of one."""
    held = gradients = trained = trained_held = whole = whole_gradients = sums = 0
    expert_held = expert_gradients = parts = wide_parts = 0
    states = 0.0
    for weight in weights:
        shard, ranks = weight.shard(layout), weight.shards(layout)
        held += round(shard * weight.itemsize)
        gradients += shard * weight.gradient
        states += weight.states * shard / weight.count
        whole += round(shard * ranks * weight.itemsize)
        if weight.gradient:
            trained += shard
            trained_held += round(shard * weight.itemsize)
            whole_gradients += round(shard * ranks * weight.itemsize)
            sums += shard * ranks * weight.gradient
        dealt = weight.expert and layout.ep > 1
        if weight.partial and weight.gradient and not dealt:
            part = math.prod(weight.part(layout))
            parts += round(part * weight.itemsize)
            wide_parts += part * weight.gradient
        if dealt:
            expert_held += round(shard * weight.itemsize)
            expert_gradients += shard * weight.gradient
    of_experts = (expert_held, expert_gradients)
    sent = (*of_experts, parts, wide_parts)
    return Totals(held, gradients, states, trained, whole, whole_gradients, sums, *sent, trained_held)


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes for a document of n tokens: linear * n + square * n^2."""

    linear: float = 0.0
    square: float = 0.0

    def __call__(self, rows: int, length: int) -> float:
        """Bytes for `rows` documents of `length` tokens in one row."""
        return rows * length * (self.linear + self.square * length)

    def __add__(self, other: Growth) -> Growth:
        return Growth(self.linear + other.linear, self.square + other.square)


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes by what ranks of tensor parallelism have of them.

    Attributes:
        stream: of norms and the residual stream: whole on every rank, but for sequence parallelism.
        gathered: inputs of products whose outputs are cut: whole on every rank.
        cut: between products cut along outputs and inputs: a part on each.
        routed: of experts, for tokens times experts visited: a part on each.
    """

    stream: Growth = Growth()
    gathered: Growth = Growth()
    cut: Growth = Growth()
    routed: Growth = Growth()

    def on(self, layout: Layout, rows: int, length: int, sequence_parallel: bool = False) -> float:
        """Bytes of one rank for a microbatch."""
        whole = self.stream(rows, length) / (layout.tp if sequence_parallel else 1) + self.gathered(rows, length)
        return (whole + (self.cut(rows, length) + self.routed(rows, length)) / layout.tp) / layout.cp


@dataclass(frozen=True, slots=True, eq=False)
class LayerShape:
    """One layer; equal layers share one object.

    Attributes:
        weights: of the layer.
        flops: of a token, whole.
        kept: what autograd keeps of a microbatch.
        moved: bytes that the forward reads and writes outside of matrix products and attention.
        operations: kernels that its forward starts.
        enters: elements a token of each tensor whose gradient is summed over tp in the backward pass.
        leaves: elements a token of each tensor that is summed over tp in the forward pass.
        joins: elements a token of each tensor whose slices are gathered over tp, and scattered again going back.
        visited: experts that a token visits; 0 without experts dealt out by `ep`.
        counts: experts in all, of each module that exchanges tokens.
        attention: (query heads, key heads, width of queries and keys, width of values); None without attention.
    """

    weights: tuple[Weight, ...]
    flops: LayerFlops
    kept: Share
    moved: Share
    operations: int
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    joins: tuple[int, ...]
    visited: int = 0
    counts: int = 0
    attention: tuple[int, int, int, int] | None = None

    @property
    def trains(self) -> bool:
        return any(weight.gradient for weight in self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class ModelShape:
    """A model, as `measure.measure` found it.

    Attributes:
        layers: in order.
        before: weights used before the layers: the embedding.
        after: weights used after them: final norm, head; a tied head is not among them.
        tied: the head's weight is the embedding's.
        width: of the residual stream.
        vocabulary: rows of the head.
        itemsize: bytes of an activation.
        buffers: bytes that every rank holds.
        head_forward, head_backward: operations of the head for one position.
        head_trains: the head's weight needs a gradient.
        cpu: measured as the CPU runs it.
        dense: bytes of the largest quantised weight, of which one at a time is unpacked.
        exact: activations were found by running layers in outline; else they follow from shapes.
    """

    layers: tuple[LayerShape, ...]
    before: tuple[Weight, ...]
    after: tuple[Weight, ...]
    tied: bool
    width: int
    vocabulary: int
    itemsize: int
    buffers: int
    head_forward: int
    head_backward: int
    head_trains: bool
    cpu: bool
    exact: bool
    dense: int = 0

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self.before, *(w for layer in self.layers for w in layer.weights), *self.after)

    @property
    def parameters(self) -> int:
        return sum(weight.count for weight in self.weights)

    @property
    def whole(self) -> int:
        """Bytes of all weights and buffers."""
        return self.buffers + round(sum(weight.count * weight.itemsize for weight in self.weights))

    @property
    def has_experts(self) -> bool:
        return any(weight.expert for layer in self.layers for weight in layer.weights)
