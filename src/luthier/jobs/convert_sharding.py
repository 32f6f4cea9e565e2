"""From the fields of FSDP and ZeRO to the section `parallel` of a run: each has one effect or a named refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from luthier.jobs.sharding import FsdpConfig, ShardingStrategy, StateDictType, ZeroConfig

_OWN_LAYOUT = (
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "fsdp_cpu_offload",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "dtype",
)
"""Fields of a TorchTuneConfig that say what a sharding config says as well."""
_NOT_ZERO = ("enable_activation_checkpointing", "enable_activation_offloading")
"""Of these, what ZeRO's fields say nothing about."""
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)
_KEEPS_WEIGHTS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
"""Strategies that keep a layer's gathered weights until its backward pass: ZeRO's stage 2."""

Member = TypeVar("Member")


class Drafting(Protocol):
    """A run in the making (`convert.Draft`)."""

    def put(self, path: str, value: Any, origin: str) -> None: ...
    def refuse(self, where: str, what: str, remedy: str | None = None) -> None: ...


class ReadWord(Protocol):
    """`convert.word`."""

    def __call__(self, kind: type[Any], given: Any, where: str, draft: Any) -> Any: ...


def put_sharding(config: Any, draft: Drafting, at: str, word: ReadWord) -> None:
    """Lay `fsdp_config` or `zero_config` of a TorchTuneConfig into a run.

    Args:
        config: a TorchTuneConfig.
        draft: gains the section `parallel`, the precision and the recomputation, or what is wrong.
        at: the config's path.
        word: reads a member of an enum.
    """
    fsdp, zero = config.fsdp_config, config.zero_config
    if fsdp is None and zero is None:
        return
    name = "fsdp_config" if fsdp is not None else "zero_config"
    if fsdp is not None and zero is not None:
        draft.refuse(f"{at}.zero_config", "excludes fsdp_config: both say what is sharded", "leave one of them out")
        return
    for other in _OWN_LAYOUT:
        said_by_both = fsdp is not None or other not in _NOT_ZERO
        if said_by_both and getattr(config, other) is not None:
            draft.refuse(f"{at}.{other}", f"excludes {name}, which says the same", "leave one of them out")
    where = f"{at}.{name}"
    given = fsdp if fsdp is not None else zero
    _precision(given, draft, where)
    _checkpoints(given, draft, where, word)
    if fsdp is not None:
        _fsdp(fsdp, draft, where, word, _processes_of_a_node(config))
    else:
        _zero(zero, draft, where)


def _precision(given: FsdpConfig | ZeroConfig, draft: Drafting, where: str) -> None:
    if given.use_fp16:
        what = "fp16 is not offered, since its gradients overflow without loss scaling"
        draft.refuse(f"{where}.use_fp16", what, "leave it out: mixed_precision is bf16")
    draft.put("train.precision", "bf16" if given.mixed_precision else "fp32", f"{where}.mixed_precision")


def _checkpoints(given: FsdpConfig | ZeroConfig, draft: Drafting, where: str, word: ReadWord) -> None:
    kind = word(StateDictType, given.checkpoint_type, f"{where}.checkpoint_type", draft)
    if kind is not None and kind is not StateDictType.SHARDED_STATE_DICT:
        what = f"{kind} is not offered: checkpoints are sharded, and open on every layout"
        draft.refuse(f"{where}.checkpoint_type", what, "leave it out, and take the whole model from the export")


def _fsdp(fsdp: FsdpConfig, draft: Drafting, where: str, word: ReadWord, processes: int | None) -> None:
    recomputed = "full" if fsdp.fsdp_activation_checkpointing else "off"
    draft.put("train.activation_checkpointing", recomputed, f"{where}.fsdp_activation_checkpointing")
    strategy = word(ShardingStrategy, fsdp.sharding_strategy, f"{where}.sharding_strategy", draft)
    if strategy is None:
        return
    at = f"{where}.sharding_strategy"
    if fsdp.hsdp and strategy not in _HYBRID:
        draft.refuse(f"{where}.hsdp", f"needs a hybrid strategy, not {strategy}", "set sharding_strategy: HYBRID_SHARD")
    sizes = {name: getattr(fsdp, name) for name in ("sharding_group_size", "replica_group_size")}
    for name, size in sizes.items():
        if size < 0:
            draft.refuse(f"{where}.{name}", f"must be at least 0, not {size}")
        elif size and not fsdp.hsdp:
            draft.refuse(f"{where}.{name}", "needs hsdp", "set hsdp, or leave it out")
    if strategy is ShardingStrategy.NO_SHARD:
        degrees = {"dp_replicate": -1, "dp_shard": 1}
    elif strategy in _HYBRID:
        degrees = _hybrid(fsdp, sizes, draft, where, processes)
    else:
        degrees = {"dp_replicate": 1, "dp_shard": -1}
    _lay_out(draft, degrees, at, keeps=strategy in _KEEPS_WEIGHTS)
    if fsdp.hsdp:
        draft.put("parallel.dp_shard", degrees["dp_shard"], f"{where}.sharding_group_size")
        draft.put("parallel.dp_replicate", degrees["dp_replicate"], f"{where}.replica_group_size")
    _offload(draft, fsdp.fsdp_cpu_offload, f"{where}.fsdp_cpu_offload", strategy is not ShardingStrategy.NO_SHARD)


def _hybrid(
    fsdp: FsdpConfig, sizes: Mapping[str, int], draft: Drafting, where: str, processes: int | None
) -> dict[str, int]:
    """Copies and shards; by itself a strategy shards within a node."""
    shards, copies = sizes["sharding_group_size"], sizes["replica_group_size"]
    if not fsdp.hsdp:
        if processes is None:
            remedy = "name num_procs_per_node, or set hsdp and sharding_group_size"
            draft.refuse(f"{where}.sharding_strategy", "shards within a node, whose processes are not named", remedy)
        return {"dp_replicate": -1, "dp_shard": processes or 1}
    if not shards and not copies:
        remedy = "set sharding_group_size to the processes that share one copy"
        draft.refuse(f"{where}.hsdp", "needs the size of a group", remedy)
    return {"dp_replicate": copies or -1, "dp_shard": shards or -1}


def _zero(zero: ZeroConfig, draft: Drafting, where: str) -> None:
    at = f"{where}.stage"
    match zero.stage:
        case 0:
            _lay_out(draft, {"dp_replicate": -1, "dp_shard": 1}, at, keeps=False)
        case 1:
            what = "FSDP2 has no equal of stage 1, which shards the moments alone"
            draft.refuse(at, what, "use 2: the same numbers, and less memory")
        case 2 | 3:
            _lay_out(draft, {"dp_replicate": 1, "dp_shard": -1}, at, keeps=zero.stage == 2)
        case _:
            draft.refuse(at, f"there is no stage {zero.stage}", "use 0, 2 or 3")
    _offload(draft, zero.zero_cpu_offload, f"{where}.zero_cpu_offload", zero.stage != 0)


def _lay_out(draft: Drafting, degrees: Mapping[str, int], at: str, *, keeps: bool) -> None:
    for name, degree in degrees.items():
        draft.put(f"parallel.{name}", degree, at)
    if degrees["dp_shard"] != 1:
        draft.put("parallel.reshard", "never" if keeps else "always", at)


def _offload(draft: Drafting, asked: bool, where: str, sharded: bool) -> None:
    if asked and not sharded:
        draft.refuse(where, "keeps shards in the host's memory, and nothing is sharded", "shard, or leave it out")
    elif asked:
        draft.put("parallel.cpu_offload", True, where)


def _processes_of_a_node(config: Any) -> int | None:
    """What the config says of it; whether it is a number has been checked."""
    if config.num_procs_per_node is not None:
        return int(config.num_procs_per_node)
    gpus = (config.resources_per_node or {}).get("gpu")
    return int(gpus) if gpus is not None and str(gpus).isdigit() and int(gpus) > 0 else None
