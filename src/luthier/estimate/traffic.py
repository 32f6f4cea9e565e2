"""Bytes that a rank sends in a step, by what they are, over which group and over which link.

A collective's bytes are those of its ring: of an all-gather or reduce-scatter of S bytes over n ranks each rank sends
S (n - 1) / n, of an all-reduce twice as much, of an all-to-all what is meant for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from luthier.estimate.plan import AGAIN, Held, Plan, held_by
from luthier.estimate.shape import LayerShape, ModelShape, totals
from luthier.losses.chunks import DEFAULT_CHUNK
from luthier.parallel.layout import Layout
from luthier.parallel.programs import PROGRAMS

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]
Axis = Literal["fsdp", "efsdp", "dp_replicate", "tp", "cp", "pp", "ep", "data", "world"]
Phase = Literal["forward", "backward", "step"]
_KEPT_BYTES = 256 << 20
"""Scores of a chunk of positions, where the vocabulary is dealt out (losses/vocabulary_parallel.py)."""


class Flow(NamedTuple):
    """One kind of message of a step.

    Attributes:
        what: in words.
        kind: the collective.
        axis: whose ranks take part.
        phase: when it happens.
        sent: bytes that one rank sends in a step.
        calls: how often.
    """

    what: str
    kind: Kind
    axis: Axis
    phase: Phase
    sent: int
    calls: int


def group(layout: Layout, axis: Axis) -> tuple[int, int]:
    """(ranks of a group, distance between neighbours in it), by the order of parallel/mesh.py.

    >>> group(Layout(dp_shard=4, tp=2), "tp"), group(Layout(dp_shard=4, tp=2), "fsdp")
    ((2, 1), (4, 2))
    """
    match axis:
        case "tp":
            return layout.tp, 1
        case "cp":
            return layout.cp, layout.tp
        case "fsdp":
            return layout.fsdp, layout.tp
        case "dp_replicate":
            return layout.dp_replicate, layout.fsdp * layout.tp
        case "pp":
            return layout.pp, layout.ranks // layout.pp
        case "ep":
            return layout.ep, 1
        case "efsdp":
            return layout.efsdp, layout.ep
        case "data":
            return layout.data_ranks, layout.cp * layout.tp
        case "world":
            return layout.ranks, 1


def traffic(shape: ModelShape, plan: Plan, rank: int = 0) -> list[Flow]:
    """What a rank of one place in the pipeline sends in a step.

    Args:
        shape: the model.
        plan: layout and batch.
        rank: of the pipeline.
    """
    held = held_by(shape, plan.layout.pp, plan.schedule, plan.stages_per_rank)[rank]
    flows = [
        *_weights(shape, plan, held),
        *waited_for(shape, plan, held),
        *_pipeline(shape, plan, held),
        *_numbers(plan),
    ]
    return [flow for flow in flows if flow.sent]


def waited_for(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """Of what a rank sends in a step, the messages between products, which nothing hides: those of tp, cp and ep."""
    return chain(_tensor(shape, plan, held), _context(shape, plan, held), _experts(shape, plan, held))


def busiest(shape: ModelShape, plan: Plan) -> list[Flow]:
    """Of the rank of the pipeline that sends most."""
    return max(
        (traffic(shape, plan, rank) for rank in range(plan.layout.pp)), key=lambda found: sum(f.sent for f in found)
    )


def on_links(layout: Layout, flow: Flow, gpus_per_node: int) -> tuple[float, float]:
    """Of what one rank sends, the bytes that stay in its node and those that leave it, on the average of its group.

    A ring over several nodes passes from one to the next once; of an all-to-all all that is for ranks elsewhere leaves.
    """
    ranks, distance = group(layout, flow.axis)
    near = max(1, min(ranks, gpus_per_node // distance)) if distance < gpus_per_node else 1
    if near == ranks:
        return float(flow.sent), 0.0
    match flow.kind:
        case "all_to_all":
            away = (ranks - near) / (ranks - 1)
        case "send":
            away = 1.0 / near if near > 1 else 1.0
        case _:
            away = 1.0 / near
    return flow.sent * (1 - away), flow.sent * away


def _weights(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """FSDP: weights are gathered layer by layer, gradients summed and dealt out again; HSDP: and summed over copies."""
    layout, times, backs = plan.layout, plan.microbatches, plan.microbatches
    if layout.fsdp == layout.dp_replicate == 1:
        return
    if layout.pp > 1:  # torch's schedules sum gradients once, and keep what is not given back in the forward pass
        times, backs = times if plan.reshard else 1, 1
    groups = [("outside of the layers", totals(held.outside, layout), 1, False)]
    groups += [("of the layers", totals(layer.weights, layout), count, plan.reshard) for layer, count in held.kinds]
    axes: tuple[Axis, ...] = ("fsdp", "efsdp") if layout.ep > 1 else ("fsdp",)
    for axis in axes:
        ranks, _ = group(layout, axis)
        copies = layout.dp_replicate
        gathered: dict[str, list[int]] = {}
        again = scattered = summed = scatters = calls = 0
        for what, of, count, reshard in groups:
            dealt = axis == "efsdp"
            held_here = of.expert_held if dealt else of.held - of.expert_held
            trained = of.expert_gradients if dealt else of.gradients - of.expert_gradients
            size = held_here * (ranks - 1) * count
            entry = gathered.setdefault(what, [0, 0])
            entry[0] += size
            entry[1] += count if held_here else 0
            again += size if reshard else 0
            calls += count if reshard and held_here else 0
            scattered += trained * (ranks - 1) * count
            scatters += count if trained else 0
            summed += 2 * trained * (copies - 1) // copies * count
        for what, (size, number) in gathered.items():
            yield Flow(f"weights {what}", "all_gather", axis, "forward", size * times, number * times)
        yield Flow("weights of the layers", "all_gather", axis, "backward", again * times, calls * times)
        yield Flow("gradients", "reduce_scatter", axis, "backward", scattered * backs, scatters * backs)
        yield Flow("gradients of copies", "all_reduce", "dp_replicate", "backward", summed * backs, scatters * backs)


def _stream(shape: ModelShape, plan: Plan) -> int:
    """Bytes of one microbatch's residual stream on a rank of cp."""
    return plan.local_tokens * shape.width * shape.itemsize


def _times(plan: Plan) -> float:
    """How often layers run forward for a microbatch, on the average: again where they are recomputed."""
    return 1.0 + AGAIN[plan.checkpointing]


def _tensor(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """Sums of the parts of products: what leaves them forward, gradients of what enters them backward."""
    layout, times = plan.layout, plan.microbatches
    if layout.tp == 1:
        return
    others, again = layout.tp - 1, _times(plan)
    element = plan.local_tokens * shape.itemsize

    def dealt(layer: LayerShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What leaves and enters; experts that ep deals out sum nothing over tp."""
        mixed = layer.visited and layout.ep > 1
        return (layer.leaves[:-1], layer.enters[:-2]) if mixed else (layer.leaves, layer.enters)

    out, back = held.sum(lambda layer: sum(dealt(layer)[0])), held.sum(lambda layer: sum(dealt(layer)[1]))
    calls = held.sum(lambda layer: len(dealt(layer)[0]))
    backs = held.sum(lambda layer: len(dealt(layer)[1]))
    if held.first:
        embedded = 2 * _stream(shape, plan) * others // layout.tp
        yield Flow("embeddings", "all_reduce", "tp", "forward", embedded * times, times)
    sent = round(2 * out * again * element * others / layout.tp) * times
    yield Flow("outputs of layers", "all_reduce", "tp", "forward", sent, round(calls * again) * times)
    sent = round(2 * back * element * others / layout.tp) * times
    yield Flow("gradients of layers' inputs", "all_reduce", "tp", "backward", sent, round(backs) * times)
    slices = held.sum(lambda layer: sum(-(-width // layout.tp) for width in layer.joins)) * element * others
    joins = round(held.sum(lambda layer: len(layer.joins)))
    yield Flow("slices", "all_gather", "tp", "forward", round(slices * again) * times, round(joins * again) * times)
    yield Flow("gradients of slices", "reduce_scatter", "tp", "backward", round(slices) * times, joins * times)
    whole = totals(held.outside, layout)
    layers = [(totals(layer.weights, layout), count) for layer, count in held.kinds]
    if (layout.fsdp > 1 or layout.dp_replicate > 1) and layout.pp == 1:  # FSDP wants whole gradients each time
        parts, often = whole.parts + sum(count * of.parts for of, count in layers), times
    else:
        parts, often = whole.wide_parts + sum(count * of.wide_parts for of, count in layers), 1
    sent = 2 * parts * others // layout.tp * often
    yield Flow("gradients made in parts", "all_reduce", "tp", "backward" if often > 1 else "step", sent, often)
    if held.last:
        columns = -(-shape.vocabulary // layout.tp)
        chunk = max(16, min(DEFAULT_CHUNK, _KEPT_BYTES // (columns * shape.itemsize)))
        chunks = -(-plan.local_tokens // chunk)
        wide = max(4, shape.itemsize)
        sums = 3 * plan.local_tokens * wide * others
        yield Flow("sums over the vocabulary", "all_gather", "tp", "forward", sums * times, chunks * times)
        hidden = 2 * _stream(shape, plan) * others // layout.tp
        yield Flow("gradients of hidden states", "all_reduce", "tp", "forward", hidden * times, times)


def _context(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """Positions for heads and back, or keys and values to all."""
    layout, times = plan.layout, plan.microbatches
    if layout.cp == 1:
        return
    forward = backward = calls = 0
    for layer, count in held.kinds:
        if layer.attention is None:
            continue
        heads, keys, wide, value = layer.attention
        heads, keys = heads // layout.tp, max(1, keys // layout.tp)
        position = plan.local_tokens * shape.itemsize
        if heads % layout.cp:
            sent = (layout.cp - 1) * keys * (wide + value) * position
            forward += sent * count
            backward += sent * count
            calls += count
            continue
        own = heads // layout.cp
        read = sum(len({head * keys // heads for head in range(r * own, (r + 1) * own)}) for r in range(1, layout.cp))
        to_heads = (own * (layout.cp - 1) * wide + read * (wide + value)) * position
        back = own * (layout.cp - 1) * value * position
        forward += (to_heads + back) * count
        backward += (to_heads + back) * count
        calls += 2 * count
    again = _times(plan)
    if held.last:
        logprobs = plan.local_tokens * max(4, shape.itemsize) * (layout.cp - 1)
        yield Flow("log-probabilities", "all_gather", "cp", "forward", logprobs * times, times)
        loss = 2 * 8 * (layout.cp - 1) // layout.cp
        yield Flow("losses", "all_reduce", "cp", "forward", loss * times, times)
    yield Flow("heads and positions", "all_to_all", "cp", "forward", round(forward * again) * times, calls * times)
    yield Flow("heads and positions", "all_to_all", "cp", "backward", backward * times, calls * times)


def _experts(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """Tokens to their experts and back, where each expert is visited equally often."""
    layout, times = plan.layout, plan.microbatches
    if layout.ep == 1:
        return
    again = _times(plan)
    stream = _stream(shape, plan)
    rows = counts = joins = layers = 0
    for layer, count in held.kinds:
        if layer.visited:
            layers += count
            rows += layer.visited * stream // layout.tp * (layout.ep - 1) // layout.ep * count
            counts += 8 * layer.counts * (layout.ep - 1) // layout.ep * count
            joins += stream * (layout.tp - 1) // layout.tp * count
    visits = round(2 * rows * again) * times
    yield Flow("tokens to experts and back", "all_to_all", "ep", "forward", visits, 2 * layers * times)
    yield Flow("how many come", "all_to_all", "ep", "forward", round(counts * again) * times, layers * times)
    yield Flow("gradients of both", "all_to_all", "ep", "backward", 2 * rows * times, 2 * layers * times)
    yield Flow("tokens of tp's ranks", "all_gather", "tp", "forward", round(joins * again) * times, layers * times)
    yield Flow("gradients of tp's ranks", "all_gather", "tp", "backward", joins * times, layers * times)


def _pipeline(shape: ModelShape, plan: Plan, held: Held) -> Iterator[Flow]:
    """Hidden states to the next stage, their gradients to the one before; what the last stage finds, to all."""
    layout, times = plan.layout, plan.microbatches
    if layout.pp == 1:
        return
    places = PROGRAMS[plan.schedule].ranks_of_stages(layout.pp, plan.stages_per_rank)
    pairs = list(pairwise(places))
    ahead = sum(here == held.rank and there != held.rank for here, there in pairs)
    behind = sum(there == held.rank and here != held.rank for here, there in pairs)
    stream = _stream(shape, plan)
    yield Flow("hidden states", "send", "pp", "forward", ahead * stream * times, ahead * times)
    yield Flow("gradients of hidden states", "send", "pp", "backward", behind * stream * times, behind * times)
    if shape.tied and held.first != held.last and shape.before and totals(shape.before, layout).gradients:
        shared = totals(shape.before, layout).gradients
        yield Flow("gradients of the tied embedding", "send", "pp", "step", shared, 1)
    told = 8 * times + 8 * times + 8 * times * plan.row_tokens  # how many there are, losses, log-probabilities
    yield Flow("losses and log-probabilities", "broadcast", "pp", "step", told, 2)


def _numbers(plan: Plan) -> Iterator[Flow]:
    """The loss and the gradient norm, a float64 each."""
    numbers: tuple[tuple[str, Axis], ...] = (("loss", "data"), ("gradient norm", "world"))
    for what, axis in numbers:
        ranks, _ = group(plan.layout, axis)
        yield Flow(what, "all_reduce", axis, "step", 2 * 8 * (ranks - 1) // ranks, 1)
