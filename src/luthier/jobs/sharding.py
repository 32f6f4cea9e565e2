"""How the processes of a job share a model, by the fields that KEP-2401 gives PyTorch's FSDP and DeepSpeed's ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from luthier.jobs.types import fields_named


class ShardingStrategy(StrEnum):
    """What FSDP shards, by the names of `torch.distributed.fsdp.ShardingStrategy`."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"


class StateDictType(StrEnum):
    """How checkpoints lie on disk, by the names of `torch.distributed.fsdp.StateDictType`."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"


@fields_named
@dataclass
class FsdpConfig:
    """Fully sharded data parallelism.

    Attributes:
        mixed_precision: bf16 weights and arithmetic, sums over processes in fp32; False is fp32 throughout.
        use_fp16: refused: fp16 needs its loss scaled, bf16 does not.
        fsdp_cpu_offload: keep shards of weights, gradients and moments in the host's memory.
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, or HYBRID_SHARD: shards within a node, copies across.
        hsdp: let a hybrid strategy shard over groups of a size of one's own.
        sharding_group_size: processes that share one copy; 0 for whatever is left. Needs hsdp.
        replica_group_size: copies, each of one sharding group; 0 for whatever is left. Needs hsdp.
        checkpoint_type: sharded is the one there is; it opens on every layout, and the export is whole.
        fsdp_activation_checkpointing: compute every layer again in the backward pass.
    """

    mixed_precision: bool = True
    use_fp16: bool = False
    fsdp_cpu_offload: bool = False
    sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD
    hsdp: bool = False
    sharding_group_size: int = 0
    replica_group_size: int = 0
    checkpoint_type: StateDictType | str = StateDictType.SHARDED_STATE_DICT
    fsdp_activation_checkpointing: bool = True


@fields_named
@dataclass
class ZeroConfig:
    """The zero redundancy optimizer, whose stages 2 and 3 are strategies of FSDP.

    Attributes:
        stage: 0 copies, 2 shards gradients and moments, 3 weights too. Stage 1 is refused.
        zero_cpu_offload: keep shards in the host's memory; stages 2 and 3.
        checkpoint_type: as of `FsdpConfig`.
        mixed_precision: as of `FsdpConfig`.
        use_fp16: refused, as of `FsdpConfig`.
    """

    stage: int = 0
    zero_cpu_offload: bool = False
    checkpoint_type: StateDictType | str = StateDictType.SHARDED_STATE_DICT
    mixed_precision: bool = True
    use_fp16: bool = False
