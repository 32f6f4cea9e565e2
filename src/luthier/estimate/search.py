"""Which layouts of a model on so many GPUs are worth trying, the fastest first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from luthier.config import ParallelConfig
from luthier.errors import ConfigError
from luthier.estimate.beside import NOTHING, Beside
from luthier.estimate.cluster import Cluster
from luthier.estimate.memory import Memory, memory
from luthier.estimate.plan import Checkpointing, Plan
from luthier.estimate.shape import ModelShape
from luthier.estimate.time import Time, least_time, mfu, step_time
from luthier.parallel.layout import Layout, Refusal
from luthier.parallel.programs import PROGRAMS

CHECKPOINTING: tuple[Checkpointing, ...] = ("off", "selective", "full")


@dataclass(frozen=True, slots=True)
class Found:
    """One way to run, weighed.

    Attributes:
        plan: the way.
        memory: of the rank that needs most.
        time: of a step.
        mfu: share of all GPUs' peak that is useful.
    """

    plan: Plan
    memory: Memory
    time: Time
    mfu: float

    @property
    def tokens_per_second(self) -> float:
        return self.plan.step_tokens / self.time.total


_AS_LEFT_OUT = ParallelConfig()


def search(
    shape: ModelShape,
    cluster: Cluster,
    ranks: int,
    *,
    length: int,
    step_tokens: int,
    refusal: Refusal = lambda name, degree: None,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    method: Beside = NOTHING,
    reshards: Callable[[int], bool] = _AS_LEFT_OUT.reshards,
    options: Mapping[str, Any] | None = None,
    keep: int = 10,
) -> list[Found]:
    """Weigh every layout, size of microbatch and recomputation that fits.

    Of each layout the fastest way that fits in memory is kept; a tenth of a per cent decides for fewer degrees.

    Args:
        shape: the model.
        cluster: of `ranks` GPUs.
        ranks: how many.
        length: tokens of a document.
        step_tokens: of a step of all ranks; what is nearest to it with whole microbatches is taken.
        refusal: says which degrees the run admits.
        schedule: of the pipeline.
        stages_per_rank: of that schedule.
        method: what the way of training keeps beside the model.
        reshards: whether gathered weights are given back, of so many stages.
        options: other fields of a `Plan` that the run sets whatever its layout: cpu_offload, in_backward,
            sequence_parallel.
        keep: how many to return.

    Raises:
        ConfigError: none can be, or none fits; says why, or which comes nearest.
    """
    cluster = cluster.for_ranks(ranks)
    limit = cluster.memory * cluster.memory_share
    possible = list(layouts(shape, ranks, cluster.gpus_per_node, refusal, stages_per_rank))
    if not possible:
        what = f"no layout of {ranks:,} ranks can be: on dp_shard {ranks}, {refusal('dp_shard', ranks)}"
        raise ConfigError(what, where="--gpus", remedy="take one GPU")
    plans = [
        replace(
            _plan(layout, length, rows, microbatches, schedule, stages_per_rank, reshards(layout.pp)), **(options or {})
        )
        for layout in possible
        for rows, microbatches in _batches(layout, length, step_tokens, method.together)
    ]
    least = {plan: least_time(shape, plan, cluster) / plan.step_tokens for plan in plans}
    best: dict[Layout, Found] = {}
    smallest: tuple[float, Plan] | None = None
    slowest = 0.0
    for fastest in sorted(plans, key=least.__getitem__):  # what recomputes nothing is the fastest of its kind
        if 1 / least[fastest] < slowest:
            break
        at_best = step_time(shape, fastest, cluster)
        if fastest.step_tokens / at_best.total < slowest:
            continue
        for checkpointing in CHECKPOINTING:
            plan = replace(fastest, checkpointing=checkpointing)
            needed = memory(shape, plan, method)
            if smallest is None or needed.total < smallest[0]:
                smallest = (needed.total, plan)
            if needed.total > limit:
                continue
            time = at_best if plan == fastest else step_time(shape, plan, cluster)
            found = Found(plan, needed, time, mfu(shape, plan, cluster, time.total))
            if plan.layout not in best or found.tokens_per_second > best[plan.layout].tokens_per_second:
                best[plan.layout] = found
                slowest = _slowest(best, keep)
            break
    if not best:
        if smallest is None:
            what = f"a step of {step_tokens:,} tokens has too few documents of {length:,} for {ranks:,} GPUs"
            raise ConfigError(what, where="--gpus", remedy="take fewer GPUs, or raise train.tokens_per_step")
        what = f"no layout fits in {limit / 2**30:.1f} GiB: {smallest[1].layout} needs {smallest[0] / 2**30:.1f} GiB"
        raise ConfigError(what, where="--gpus", remedy="take more GPUs, or train adapters")
    ranked = sorted(best.values(), key=lambda found: (-round(found.tokens_per_second, -1), _degrees(found.plan.layout)))
    return ranked[:keep]


def layouts(
    shape: ModelShape, ranks: int, gpus_per_node: int, refusal: Refusal, stages_per_rank: int = 1
) -> Iterator[Layout]:
    """Every layout of so many ranks that the run admits.

    tp and cp stay within a node; where there are copies, each fills one node or four, or is one rank's.
    """
    most = {
        "dp_replicate": ranks,
        "dp_shard": ranks,
        "tp": gpus_per_node,
        "cp": gpus_per_node,
        "pp": min(16, len(shape.layers) // stages_per_rank),
        "ep": ranks,
    }
    allowed = {
        name: [d for d in _divisors(ranks) if d == 1 or (d <= limit and refusal(name, d) is None)]
        for name, limit in most.items()
        if name != "ep" or shape.has_experts
    }
    for tp, cp, pp in itertools.product(allowed["tp"], allowed["cp"], allowed["pp"]):
        if ranks % (tp * cp * pp):
            continue
        data = ranks // (tp * cp * pp)
        for replicas in allowed["dp_replicate"]:
            shards, rest = divmod(data, replicas)
            if rest or shards not in allowed["dp_shard"]:
                continue
            nodes = shards * cp * tp / gpus_per_node
            if replicas > 1 and shards > 1 and nodes not in (1, 4):
                continue  # copies cost memory, and spare messages where their shards are near
            for ep in allowed.get("ep", [1]):
                if ep == 1 or (ep % tp == 0 and (shards * cp * tp) % ep == 0):
                    yield Layout(replicas, shards, cp, tp, pp, ep)


def _plan(
    layout: Layout, length: int, rows: int, microbatches: int, schedule: str, stages_per_rank: int, reshard: bool
) -> Plan:
    if layout.pp == 1:
        return Plan(layout, length, rows, microbatches, reshard=reshard, schedule=schedule)
    needed = PROGRAMS[schedule].microbatches(microbatches, layout.pp, stages_per_rank)
    return Plan(layout, length, rows, needed, reshard=reshard, schedule=schedule, stages_per_rank=stages_per_rank)


def _slowest(best: dict[Layout, Found], keep: int) -> float:
    """Tokens a second of the slowest that would be kept; 0 where there is room for more."""
    rates = heapq.nlargest(keep, (found.tokens_per_second for found in best.values()))
    return rates[-1] if len(rates) == keep else 0.0


def _batches(layout: Layout, length: int, step_tokens: int, fewest: int) -> Iterator[tuple[int, int]]:
    """(documents in a microbatch, microbatches)."""
    documents = step_tokens / (length * layout.data_ranks)
    if documents < 0.75 or (layout.cp > 1 and length % (2 * layout.cp)):
        return
    for rows in (one for one in (1, 2, 4, 8) if one >= fewest):
        microbatches = round(documents / rows)
        if microbatches < max(1, layout.pp):
            break
        yield rows, microbatches


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d < number]


def _degrees(layout: Layout) -> int:
    return sum(d > 1 for d in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep))
