"""How long a step should take on a cluster, by its terms. An expectation, not a promise: it is for comparing layouts.

Products take their operations over the rate that large matrices reach, everything else its bytes over the memory's
bandwidth, and nothing is faster than its kernels can be started. What FSDP sends hides behind the products of a layer;
what tp, cp and ep send is waited for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from luthier.estimate.cluster import Cluster
from luthier.estimate.flops import useful, work
from luthier.estimate.plan import AGAIN, Held, Plan, different, held_by
from luthier.estimate.shape import ModelShape, Totals, totals
from luthier.estimate.traffic import Axis, Flow, Phase, on_links, traffic, waited_for
from luthier.parallel.layout import Layout

_HIDDEN: tuple[Axis, ...] = ("fsdp", "efsdp", "dp_replicate")
"""Axes whose messages travel while layers compute."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step; the terms add up.

    Attributes:
        products: matrix products and attention, recomputation included.
        other: norms, activations, residuals, and kernels that cannot be started faster.
        weights: FSDP's messages that layers do not hide.
        tensor: messages of tp.
        context: of cp.
        experts: of ep.
        pipeline: messages of pp that are waited for.
        bubble: ranks of the pipeline without work.
        optimizer: the update, and the numbers that all ranks agree on.
    """

    products: float
    other: float
    weights: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        messages = self.weights + self.tensor + self.context + self.experts + self.pipeline
        return self.products + self.other + messages + self.bubble + self.optimizer

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def mfu(shape: ModelShape, plan: Plan, cluster: Cluster, seconds: float) -> float:
    """Useful operations over what all ranks could do at most in that time."""
    return useful(shape, plan) / (seconds * plan.layout.ranks * cluster.peak(shape.itemsize))


def step_time(shape: ModelShape, plan: Plan, cluster: Cluster) -> Time:
    """Of a step, set by the slowest rank of the pipeline.

    Args:
        shape: the model.
        plan: layout and batch.
        cluster: what one rank has of it.
    """
    held = held_by(shape, plan.layout.pp, plan.schedule, plan.stages_per_rank)
    return max((_of(shape, plan, cluster, one) for one in different(held)), key=lambda time: time.total)


def least_time(shape: ModelShape, plan: Plan, cluster: Cluster) -> float:
    """Seconds that `step_time` will not be below: as if the update, and messages but for those of tp, cp and ep, took
    none. How ranks of data are dealt does not count, so that few layouts of a search differ in it. Arguments as of it.
    """
    layout = plan.layout
    degrees = {"cp": layout.cp, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    fewest = layout.ep // math.gcd(layout.ep, layout.cp * layout.tp)
    alike = replace(plan, layout=Layout(dp_shard=fewest, **degrees), microbatches=1)
    return (plan.microbatches + idle(plan)) * _least(shape, alike, cluster)


@lru_cache(maxsize=1 << 14)
def _least(shape: ModelShape, plan: Plan, cluster: Cluster) -> float:
    """Of one microbatch on the slowest rank."""

    def seconds(held: Held) -> float:
        flows = (flow for flow in waited_for(shape, plan, held) if flow.sent and flow.phase != "step")
        return sum(_computing(shape, plan, cluster, held)) + sum(_seconds(flows, cluster, plan.layout).values())

    return max(seconds(one) for one in different(held_by(shape, plan.layout.pp, plan.schedule, plan.stages_per_rank)))


def _of(shape: ModelShape, plan: Plan, cluster: Cluster, held: Held) -> Time:
    layout, times = plan.layout, plan.microbatches
    seconds = _seconds(traffic(shape, plan, held.rank), cluster, layout)

    def sending(axes: Container[Axis], phases: Container[Phase] = ("forward", "backward", "step")) -> float:
        return sum(value for (axis, phase), value in seconds.items() if axis in axes and phase in phases)

    forward, backward, slow_forward, slow_backward = _computing(shape, plan, cluster, held)
    products = times * (forward + backward)
    other = times * (slow_forward + slow_backward)
    layers = max(1.0, held.sum(lambda layer: 1))
    weights = times * (
        _exposed(sending(_HIDDEN, ("forward",)) / times, forward + slow_forward, layers)
        + _exposed(sending(_HIDDEN, ("backward",)) / times, backward + slow_backward, layers)
    )
    tensor, context, experts = sending(("tp",)), sending(("cp",)), sending(("ep",))
    passing = sending(("pp",))
    microbatch = (products + other + weights + tensor + context + experts) / times
    bubble = idle(plan) * microbatch
    sends = passing / times * (layout.pp - 1) if layout.pp > 1 else 0.0
    trained = _update(totals(held.outside, layout))
    trained += held.sum(lambda layer: _update(totals(layer.weights, layout)))
    optimizer = trained / (cluster.memory_bandwidth * cluster.bandwidth_share) + sending(("data", "world"))
    return Time(products, other, weights, tensor, context, experts, sends, bubble, optimizer)


def _computing(shape: ModelShape, plan: Plan, cluster: Cluster, held: Held) -> tuple[float, float, float, float]:
    """Seconds of a microbatch on one rank: products forward and backward, and what else takes time in each."""
    rate = cluster.peak(shape.itemsize) * cluster.flops_share
    memory = cluster.memory_bandwidth * cluster.bandwidth_share
    operations = work(shape, plan, held)
    forward, backward = operations.forward / rate, (operations.backward + operations.recomputed) / rate
    again = AGAIN[plan.checkpointing]
    moved = held.sum(lambda layer: layer.moved.on(plan.layout, plan.rows, plan.length, plan.sequence_parallel)) / memory
    if held.last:  # scores are written, made exponentials, summed and read again
        scores = plan.local_tokens * -(-shape.vocabulary // plan.layout.tp) * shape.itemsize
        moved += 4 * scores / memory
    starts = held.sum(lambda layer: layer.operations) * cluster.launch_seconds
    slow_forward = max(moved, starts - forward)
    slow_backward = max((2 + again) * moved, (2 + again) * starts - backward)
    return forward, backward, slow_forward, slow_backward


def idle(plan: Plan) -> float:
    """How many microbatches' time a rank of the pipeline waits in a step.

    Of GPipe and 1F1B it is the way through the other ranks; interleaving divides it by the stages a rank holds (arXiv
    2104.04473); splitting the backward pass fills about two thirds of it (2401.10241), in a V more (2412.19437).
    """
    others = plan.layout.pp - 1
    match plan.schedule:
        case "interleaved_1f1b":
            return others / plan.stages_per_rank
        case "zero_bubble":
            return others / (3 * plan.stages_per_rank)
        case "zero_bubble_v" | "dualpipe_v":
            return others / 6
        case _:
            return float(others)


def _update(weights: Totals) -> float:
    """Bytes that the optimizer reads and writes: weights and states both ways, gradients once."""
    return 4 * weights.trained + weights.gradients + 2 * weights.states


def _exposed(sending: float, computing: float, layers: float) -> float:
    """Of messages that travel layer by layer while others compute, what is waited for: at least those of one layer."""
    return max(sending / (layers + 1), sending - computing)


def _seconds(flows: Iterable[Flow], cluster: Cluster, layout: Layout) -> dict[tuple[Axis, Phase], float]:
    """Time that messages take one after another, of each axis in each phase."""
    found: dict[tuple[Axis, Phase], float] = defaultdict(float)
    for flow in flows:
        near, far = on_links(layout, flow, cluster.gpus_per_node)
        bandwidth = max(near / cluster.node_bandwidth, far / cluster.network_bandwidth) / cluster.bandwidth_share
        found[flow.axis, flow.phase] += flow.calls * cluster.message_seconds + bandwidth
    return found
