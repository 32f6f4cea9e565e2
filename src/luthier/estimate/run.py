"""`luthier estimate`: what a run takes, in one process or on a layout of a cluster."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from luthier.config import ParallelConfig, RunConfig
from luthier.errors import ConfigError
from luthier.estimate import measured
from luthier.estimate.beside import Beside, beside
from luthier.estimate.cluster import Cluster, find_cluster
from luthier.estimate.flops import useful
from luthier.estimate.memory import memory
from luthier.estimate.plan import Plan
from luthier.estimate.search import Found, search
from luthier.estimate.shape import ModelShape
from luthier.estimate.time import mfu, step_time
from luthier.estimate.traffic import busiest, on_links
from luthier.parallel.layout import Layout, Refusal
from luthier.parallel.programs import PROGRAMS, stages_of

_MOST_RANKS = 1_000_000
_TOKENS_A_GPU = 16384
"""Of a step, where a search is not told how many."""


def estimate(
    config: RunConfig, *, cluster: str | None = None, gpus: int | None = None, layout: str | None = None
) -> dict[str, Any]:
    """Say what a run takes.

    Operations are those of documents that fill `data.sequence_length`, with every position in the loss: the most that
    a token can take. A microbatch holds one such document.

    Args:
        config: of the run; data may be empty.
        cluster: a preset, "cpu" or a file; without one nothing is said about time.
        gpus: processes in all; the product of the layout's degrees when left out.
        layout: "dp_shard 2 x tp 2" instead of the config's `parallel`.

    Returns:
        model, adapter (a line, or None), precision; method {name, notes: what it keeps and runs beside the model, and
        what is not counted}; parameters {total, trainable}; flops {token_forward, token_backward, token_beside: forward
        passes that train nothing, token: all, step, run}; memory of a rank in bytes; on a layout or a cluster also
        layout, ranks, traffic; on a cluster time, mfu, fits.

    Raises:
        ModelError: the model's config cannot be found or read.
        ConfigError: model, optimizer or method do not admit the layout, or so many GPUs are nowhere.
    """
    from luthier.engine.build import choose_device
    from luthier.estimate.prepare import check, prepare, unseen

    _refuse_more_than_there_are(gpus or 1)
    parallel = parse_layout(layout, config.parallel) if layout is not None else config.parallel
    cpu = cluster == "cpu" or (cluster is None and choose_device(config.train.device).type == "cpu")
    resolved = Layout.resolve(parallel, gpus or _ranks(parallel))
    for name, degree in asdict(resolved).items():
        if degree > 1 and (why := config.method.refused_degree(name)):
            raise ConfigError(why, where=f"parallel.{name}")
    prepared = prepare(config, cpu=cpu)
    method = beside(config, cpu=cpu)
    check(prepared, config, resolved, method.reference)
    plan = _plan(config, parallel, resolved, method)
    shape = prepared.shape
    about = measured.About(type(prepared.model).__name__, prepared.adapter, prepared.precision, shape)
    result = _about(config, about, method)
    result["method"]["notes"] += unseen(prepared, config, resolved)
    result["memory"] = memory(shape, plan, method).to_dict()
    if cluster is None and resolved.ranks == 1:
        return result
    machine = find_cluster(cluster).for_ranks(resolved.ranks) if cluster is not None else None
    result |= {"layout": str(resolved), "ranks": resolved.ranks, "microbatches": plan.microbatches}
    result["traffic"] = _traffic(shape, plan, machine)
    result["method"]["notes"] += _alone(method)
    return result | (_timed(shape, plan, machine, result["memory"]["total"]) if machine is not None else {})


def find_layouts(config: RunConfig, gpus: int, cluster: str = "h200", keep: int = 10) -> dict[str, Any]:
    """Rank layouts of a run's model on so many GPUs.

    Args:
        config: of the run. Its batch counts where it says one; else a step is of 16,384 tokens a GPU.
        gpus: how many there are.
        cluster: a preset, "cpu" or a file.
        keep: how many layouts are told.

    Returns:
        what `estimate` says of the model, and layouts: a list, the fastest first.

    Raises:
        ModelError: the model's config cannot be found or read.
        ConfigError: no layout can be, or none fits, or so many GPUs are nowhere.
    """
    _refuse_more_than_there_are(gpus)
    machine = find_cluster(cluster)
    length, method = config.data.sequence_length, beside(config, cpu=machine.shared)
    told = config.train.tokens_per_step or config.train.rows_per_step
    tokens = _step_tokens(config, method) if told else _TOKENS_A_GPU * gpus
    about, refusal = _measured(config, machine, gpus, method)
    found = search(
        about.shape,
        machine,
        gpus,
        length=length,
        step_tokens=tokens,
        refusal=refusal,
        schedule=config.parallel.pipeline_schedule,
        stages_per_rank=stages_of(config.parallel.pipeline_schedule, config.parallel.stages_per_rank),
        method=method,
        reshards=config.parallel.reshards,
        options=_options(config, config.parallel),
        keep=keep,
    )
    result = _about(config, about, method)
    result["method"]["notes"] += _alone(method)
    local = machine.for_ranks(gpus)
    entries = [_entry(about.shape, one, local) for one in found]
    return result | {"cluster": machine.name, "gpus": gpus, "step_tokens": tokens, "layouts": entries}


def parse_layout(text: str, base: ParallelConfig) -> ParallelConfig:
    """The degrees of "dp_shard 2 x tp 2" or "dp_shard=2,tp=2", over other settings.

    Raises:
        ConfigError: it is not of this form.
    """
    degrees: dict[str, int] = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "cp": 1, "pp": 1, "ep": 1}
    named: set[str] = set()
    for part in re.split(r"\s*(?:,|\bx\b|×)\s*", text.strip()):
        match = re.fullmatch(r"(\w+)\s*[ =]\s*(-?\d+)", part)
        if match is None or match[1] not in degrees:
            remedy = f'write it as "dp_shard 2 x tp 2", with degrees of {", ".join(degrees)}'
            raise ConfigError(f"{text!r} is no layout", where="--layout", remedy=remedy)
        name, degree = match[1], int(match[2])
        if name in named:
            raise ConfigError(f"{text!r} has {name} twice", where="--layout", remedy="name each degree once")
        if degree == 0 or not -1 <= degree <= _MOST_RANKS:
            remedy = f"a degree is a number of ranks, up to {_MOST_RANKS:,}, or -1 for what is left"
            raise ConfigError(f"{text!r} has {name} {degree}", where="--layout", remedy=remedy)
        named.add(name)
        degrees[name] = degree
    return ParallelConfig.model_validate(base.model_dump() | degrees)


def _refuse_more_than_there_are(gpus: int) -> None:
    if gpus > _MOST_RANKS:
        raise ConfigError(f"{gpus:,} GPUs", where="--gpus", remedy=f"take a number up to {_MOST_RANKS:,}")


def _ranks(parallel: ParallelConfig) -> int:
    """Processes of a layout whose open degree is 1."""
    degrees = (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.cp, parallel.pp)
    product = 1
    for degree in degrees:
        product *= max(1, degree)
    return product


def _step_tokens(config: RunConfig, method: Beside) -> int:
    rows = (config.train.rows_per_step or 16) * method.documents
    grpo = config.method.name == "grpo"  # whose tokens a step are those of its prompts
    return (config.train.tokens_per_step if not grpo else None) or rows * config.data.sequence_length


def _plan(config: RunConfig, parallel: ParallelConfig, layout: Layout, method: Beside) -> Plan:
    length = config.data.sequence_length
    tokens = _step_tokens(config, method)
    program = PROGRAMS[parallel.pipeline_schedule]
    stages = parallel.stages_per_rank or program.stages_per_rank if layout.pp > 1 else 1
    microbatches = max(1, -(-tokens // (length * method.together * layout.data_ranks)))
    if layout.pp > 1:
        microbatches = program.microbatches(microbatches, layout.pp, stages)
    return Plan(
        layout,
        length,
        rows=method.together,
        microbatches=microbatches,
        checkpointing=config.train.activation_checkpointing,
        reshard=parallel.reshards(layout.pp),
        **_options(config, parallel),
        schedule=parallel.pipeline_schedule,
        stages_per_rank=stages,
    )


def _options(config: RunConfig, parallel: ParallelConfig) -> dict[str, bool]:
    """What a run sets of a plan whatever its layout."""
    return {
        "sequence_parallel": parallel.sequence_parallel,
        "cpu_offload": parallel.cpu_offload,
        "in_backward": config.optimizer.in_backward,
    }


def _measured(config: RunConfig, machine: Cluster, gpus: int, method: Beside) -> tuple[measured.About, Refusal]:
    """A run's model in sizes, and the degrees that the run admits: from the table where it is there, else measured."""
    kept = measured.find(config) if not machine.shared else None
    if kept is not None and max(gpus, machine.gpus_per_node) <= measured.MOST_RANKS:
        return kept.about, _refusal(config, kept.refusal, method)
    from luthier.estimate.prepare import prepare, refusals

    prepared = prepare(config, cpu=machine.shared)
    about = measured.About(type(prepared.model).__name__, prepared.adapter, prepared.precision, prepared.shape)
    return about, _refusal(config, refusals(prepared, config), method)


def _refusal(config: RunConfig, of_model: Refusal, method: Beside) -> Refusal:
    """What the run's method refuses, or else its model, or else the reference that is laid out as it is."""
    asked = [of_model]
    if method.reference is not None:
        from luthier.parallel import rules

        asked.append(rules.refusals(method.reference))

    def refusal(name: str, degree: int) -> str | None:
        if degree > 1 and (why := config.method.refused_degree(name)):
            return why
        return next((why for of in asked if (why := of(name, degree))), None)

    return refusal


def _about(config: RunConfig, about: measured.About, method: Beside) -> dict[str, Any]:
    shape, length = about.shape, config.data.sequence_length
    one = Plan(Layout(), length)
    forward = useful(shape, one, backward=False)
    backward = useful(shape, one) - forward
    others = method.forwards * forward
    others += useful(method.teacher, one, backward=False) if method.teacher is not None else 0.0
    token = ((forward + backward) * method.updates + others) / length
    tokens = _step_tokens(config, method)
    steps = config.train.steps
    return {
        "model": config.model,
        "architecture": about.architecture,
        "adapter": about.adapter,
        "precision": about.precision,
        "method": {"name": config.method.name, "notes": list(method.notes)},
        "sequence_length": length,
        "parameters": {
            "total": shape.parameters,
            "trainable": sum(weight.count for weight in shape.weights if weight.gradient),
        },
        "flops": {
            "token_forward": round(forward / length),
            "token_backward": round(backward / length),
            "token_beside": round(others / length),
            "token": round(token),
            "step": round(token * tokens),
            "run": round(token * tokens * steps) if steps is not None else None,
        },
    }


def _alone(method: Beside) -> list[str]:
    """What figures of a layout leave out."""
    more = method.forwards or method.updates > 1 or method.samples or method.teacher is not None
    return ["messages, time and MFU are those of one pass that trains, without what is beside it"] if more else []


def _traffic(shape: ModelShape, plan: Plan, machine: Cluster | None) -> dict[str, Any]:
    """What the busiest rank sends in a step."""
    flows = busiest(shape, plan)
    told = [flow._asdict() for flow in flows]
    links = None
    if machine is not None:
        shares = [on_links(plan.layout, flow, machine.gpus_per_node) for flow in flows]
        links = {"node": round(sum(near for near, _ in shares)), "network": round(sum(far for _, far in shares))}
    return {"sent": sum(flow.sent for flow in flows), "links": links, "flows": told}


def _timed(shape: ModelShape, plan: Plan, machine: Cluster, needed: float) -> dict[str, Any]:
    time = step_time(shape, plan, machine)
    return {
        "cluster": machine.name,
        "memory_limit": round(machine.memory),
        "fits": needed <= machine.memory * machine.memory_share,
        "time": time.to_dict(),
        "tokens_per_second": plan.step_tokens / time.total,
        "mfu": mfu(shape, plan, machine, time.total),
    }


def _entry(shape: ModelShape, found: Found, machine: Cluster) -> dict[str, Any]:
    plan = found.plan
    return {
        "layout": str(plan.layout),
        "degrees": asdict(plan.layout),
        "rows": plan.rows,
        "microbatches": plan.microbatches,
        "activation_checkpointing": plan.checkpointing,
        "memory": found.memory.to_dict(),
        "traffic": _traffic(shape, plan, machine)["links"],
        "time": found.time.to_dict(),
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
    }
