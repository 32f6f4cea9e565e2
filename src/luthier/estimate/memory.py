"""Bytes that a step takes on one rank, by what they are for, at the moment when they are most.

What follows from shapes is exact: shards, gradients, moments, gathered weights. Activations are what layers keep when
they are run in outline (`hf/outline.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import attrgetter

from luthier.estimate.beside import NOTHING, Beside
from luthier.estimate.plan import Held, Plan, different, held_by
from luthier.estimate.shape import LayerShape, ModelShape, Totals, totals
from luthier.losses.chunks import DEFAULT_CHUNK, LOGITS_CHUNK
from luthier.parallel.layout import Layout

_KEPT_BYTES = 320 << 20
_TILE = {True: 2048, False: 16384}
"""Of the head at work (losses/cross_entropy.py): scores kept for the gradient of its weight, columns at a time."""
_PIECE = {True: 1 << 18, False: 1 << 24}
"""Elements that the optimizer treats at once (optim/optimizer.py); it takes about 12 bytes for each, of bf16 20."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for.

    Attributes:
        weights: shards of them, buffers and adapters included, tied ones once.
        transient: weights of other ranks, a quantised one unpacked, gradients on their way, the optimizer at work.
        gradients: of what trains, fp32 for bf16 weights.
        optimizer: moments, and the low bits of bf16 weights.
        activations: kept from the forward for the backward pass, of all microbatches on their way.
        logits: of the head at work: scores, and gradients of the hidden states and of its weight.
        beside: what the method keeps beside the model: a copy of what trains, a teacher, a model that samples.
        total: of all these.
    """

    weights: int
    transient: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    beside: int = 0

    @property
    def total(self) -> int:
        step = self.gradients + self.optimizer + self.activations + self.logits
        return self.weights + self.transient + step + self.beside

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


_TOTAL = attrgetter("total")


def memory(shape: ModelShape, plan: Plan, method: Beside = NOTHING) -> Memory:
    """Of the rank of the pipeline that needs most."""
    held = held_by(shape, plan.layout.pp, plan.schedule, plan.stages_per_rank)
    return max((memory_of(shape, plan, one, method) for one in different(held)), key=_TOTAL)


def memory_of(shape: ModelShape, plan: Plan, held: Held, method: Beside = NOTHING) -> Memory:
    """Of one rank, at its largest moment.

    Args:
        shape: the model.
        plan: layout and batch.
        held: what this rank has.
        method: what the way of training keeps beside it.
    """
    copy = 0 if plan.cpu_offload else _own(held, plan.layout).copy
    kept = method.copies * copy
    kept += shape.whole * (method.samples and plan.layout.ranks > 1)
    kept += method.teacher.whole if method.teacher is not None else 0
    head = 0
    if held.last:
        head = _compared(shape, plan, method) if method.compares else _logits(shape, plan)
    moments = [(*moment, kept) for moment in _moments(shape, plan, held, head)]
    weights, _, _, states, *_ = moments[0]
    fsdp = _gathered(held, plan.layout, plan.reshard)
    if method.copies:  # while it is asked, what trains now is kept too
        moments.append((weights, fsdp.root + fsdp.ahead, 0, states, 0, _logits(shape, plan, trains=False), kept + copy))
    if method.asked is not None:
        moments.append((weights, 0, 0, states, 0, 0, kept + _laid_out(method.asked, plan, held.rank)))
    if method.asked_whole is not None:
        moments.append((weights, 0, 0, states, 0, 0, kept + method.asked_whole.whole))
    weights, transient, *others = max(moments, key=sum)
    return Memory(weights, transient + shape.dense // plan.layout.tp, *others)


def _laid_out(other: ModelShape, plan: Plan, rank: int) -> int:
    """Of another model on the same layout: its shards, what is gathered of them, its head at work."""
    held = held_by(other, plan.layout.pp, plan.schedule, plan.stages_per_rank)[rank]
    fsdp = _gathered(held, plan.layout, plan.reshard)
    head = _logits(other, plan, trains=False) if held.last else 0
    return other.buffers + _own(held, plan.layout).held + fsdp.root + fsdp.ahead + head


def _compared(shape: ModelShape, plan: Plan, method: Beside) -> int:
    """The head at work where it is compared with a teacher's: a chunk's logits and what is made of them, as was seen of
    steps; hidden states of both, and the gradient of its weight beside its sum."""
    size, tokens = shape.itemsize, plan.local_tokens
    columns = -(-shape.vocabulary // plan.layout.tp)
    of_score = size + 5 if method.compares == "likeliest" else 2 * size + 18
    found = min(tokens, LOGITS_CHUNK) * columns * of_score + 3 * tokens * shape.width * size
    if method.teacher is not None:
        found += plan.row_tokens * method.teacher.width * method.teacher.itemsize
    return found + (2 * columns * shape.width * size if shape.head_trains else 0)


def _moments(shape: ModelShape, plan: Plan, held: Held, head: int) -> Iterator[tuple[int, ...]]:
    """The moments of a step that may be the largest, in their order: bytes as `Memory` names them."""
    resident = 0 if plan.cpu_offload else 1
    own = _own(held, plan.layout)
    weights, states = shape.buffers + resident * own.held, resident * own.states
    # used and freed as they come, of one microbatch a layer's gradients at most are there
    freed = plan.in_backward and plan.microbatches == 1
    inside, outside = resident * (own.layer if freed else own.inside), resident * own.outside
    there = inside + outside if plan.microbatches > 1 else 0  # of an earlier microbatch
    full, kept = _full(plan, held), _kept(shape, plan, held)
    again = full if plan.checkpointing != "off" else 0
    stream = plan.local_tokens * shape.width * shape.itemsize
    all_kept = round(held.sum(lambda layer: kept[layer])) + 2 * stream
    flying = plan.in_flight[held.rank] * all_kept
    last = flying - all_kept + max(kept.values(), default=0) + 2 * stream
    table = totals(shape.before, plan.layout).whole_gradients if held.first else 0
    fsdp = _gathered(held, plan.layout, plan.reshard)

    yield weights, fsdp.root + fsdp.ahead, there, states, flying, head
    if not fsdp.is_sharded:
        # what the head's weight gets is there before any layer's
        yield weights, 0, max(there, outside), states, flying + again, 2 * stream
        # the first layer: the other layers' activations are gone, the embedding's gradient is made beside its sum
        yield weights, 0, inside + (0 if freed else outside), states, last + again, 2 * stream + table
    else:
        there_too = fsdp.root + fsdp.root_gradient
        yield weights, there_too + fsdp.back, there, states, flying + again, 2 * stream
        yield weights, there_too + max(fsdp.back, table), max(inside, there), states, last + again, 2 * stream
        summed = there_too + fsdp.root_sum
        yield weights, summed, max(inside, there), states, last - max(kept.values(), default=0), 0
    work = (20 if shape.itemsize == 2 else 12) * min(own.trained, _PIECE[shape.cpu])
    yield weights, resident * work, (0 if freed else inside) + outside, states, 0, 0


@dataclass(frozen=True, slots=True)
class _Own:
    """Of one rank's shards.

    Attributes:
        held: bytes of them.
        states: of their optimizer states.
        inside, outside: of the gradients of layers, and of the rest.
        layer: of the gradients of the largest layer.
        trained: elements that train.
        copy: bytes of those.
    """

    held: int
    states: int
    inside: int
    outside: int
    layer: int
    trained: int
    copy: int


@lru_cache(maxsize=1 << 14)
def _own(held: Held, layout: Layout) -> _Own:
    root, layers = _totals(held, layout)
    return _Own(
        held=root.held + sum(count * of.held for of, count in layers),
        states=round(root.states + sum(count * of.states for of, count in layers)),
        inside=sum(count * of.gradients for of, count in layers),
        outside=root.gradients,
        layer=max((of.gradients for of, _ in layers), default=0),
        trained=root.trained + sum(count * of.trained for of, count in layers),
        copy=root.trained_held + sum(count * of.trained_held for of, count in layers),
    )


def _totals(held: Held, layout: Layout) -> tuple[Totals, list[tuple[Totals, int]]]:
    """Of what is outside of the layers, and of each kind of layer."""
    return totals(held.outside, layout), [(totals(layer.weights, layout), count) for layer, count in held.kinds]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Bytes of what FSDP brings together for a while.

    Attributes:
        is_sharded: whether there is FSDP at all.
        root: the weights outside of the layers, which stay through both passes.
        root_gradient: their gradients, before they are summed.
        root_sum: those in fp32, as they are sent.
        ahead: weights of layers in the forward pass: of one and the next, or of all.
        back: in the backward pass: the same, a layer's gradients, and those in fp32, as they are sent.
    """

    is_sharded: bool = False
    root: int = 0
    root_gradient: int = 0
    root_sum: int = 0
    ahead: int = 0
    back: int = 0


@lru_cache(maxsize=1 << 14)
def _gathered(held: Held, layout: Layout, reshard: bool) -> _Gathered:
    if layout.fsdp == layout.dp_replicate == 1:
        return _Gathered()
    root, layers = _totals(held, layout)
    everything = sum(count * of.whole for of, count in layers)
    ahead = 2 * max((of.whole for of, _ in layers), default=0) if reshard else everything
    if layout.pp > 1:  # gradients are summed over ranks once, after the last microbatch
        waiting = sum(count * of.sums for of, count in layers)
        largest = max((of.sums for of, _ in layers), default=0)
        return _Gathered(True, root.whole, root.sums, root.sums, ahead, ahead + waiting + largest)
    gradients = max((of.whole_gradients + of.sums for of, _ in layers), default=0)
    return _Gathered(True, root.whole, root.whole_gradients, root.sums, ahead, ahead + gradients)


def _full(plan: Plan, held: Held) -> int:
    """What the largest layer keeps where nothing is computed again."""
    return max((_of(layer, plan) for layer, _ in held.kinds), default=0)


def _of(layer: LayerShape, plan: Plan) -> int:
    return round(layer.kept.on(plan.layout, plan.rows, plan.length, plan.sequence_parallel))


def _kept(shape: ModelShape, plan: Plan, held: Held) -> dict[LayerShape, int]:
    """What each kind of layer keeps of one microbatch."""
    cut = plan.layout.tp if plan.sequence_parallel else 1
    alone = plan.local_tokens * shape.width * shape.itemsize // cut  # its input
    if plan.checkpointing == "offloaded" and not shape.cpu:
        alone = 0
    found = {}
    for layer, _ in held.kinds:
        full = _of(layer, plan)
        choices = {"off": full, "selective": (full + alone) // 2}
        found[layer] = choices.get(plan.checkpointing, alone)
    return found


def _logits(shape: ModelShape, plan: Plan, *, trains: bool = True) -> int:
    """The head at work: scores, a product and its sum in fp32, rows of the targets, the hidden states three times, and
    the gradient of its weight."""
    size, tokens = shape.itemsize, plan.local_tokens
    columns = -(-shape.vocabulary // plan.layout.tp)
    rows, tile = min(tokens, DEFAULT_CHUNK), min(columns, _TILE[shape.cpu])
    gradient = 0
    if shape.head_trains and trains:
        rows, tile = min(rows, max(64, _KEPT_BYTES // (columns * size))), columns
        gradient = columns * shape.width * size
    return rows * (tile * size + shape.width * (size + 8)) + 3 * tokens * shape.width * size + gradient
