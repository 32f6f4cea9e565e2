"""Every field of every config has an effect on the job, or a refusal by its name: one row a field, and none without."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import ConfigError
from luthier.jobs import (
    AdapterConfig,
    BuiltinTrainer,
    CustomDataset,
    CustomTrainer,
    CustomTrainerContainer,
    DataFormat,
    DatasetInitializer,
    DataType,
    FsdpConfig,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    Loss,
    LuthierConfig,
    ModelExporter,
    ModelInitializer,
    PrefixConfig,
    S3DatasetInitializer,
    S3ModelInitializer,
    ShardingStrategy,
    StateDictType,
    TorchTuneChatDataset,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TorchTuneMultimodalDataset,
    ZeroConfig,
)

RUNTIME = "luthier-qwen2.5-0.5b"


@dataclass(frozen=True)
class Row:
    """A field, a value of it, and what that does.

    Attributes:
        at: path in the spec ("config.train.precision"); None where the value is refused.
        expected: what stands there, or a part of the refusal.
        beside: other fields that are given too.
    """

    cls: type
    field: str
    value: Any
    at: str | None
    expected: Any
    beside: Any = ()

    def __str__(self) -> str:
        # without an address, by which processes of pytest-xdist would know it under different names
        told = re.sub(r" at 0x[0-9a-f]+", "", repr(self.value))
        return f"{self.cls.__name__}.{self.field}={told}"


def effect(cls: type, field: str, value: Any, at: str, expected: Any, **beside: Any) -> Row:
    return Row(cls, field, value, at, expected, tuple(beside.items()))


def refusal(cls: type, field: str, value: Any, words: str, **beside: Any) -> Row:
    return Row(cls, field, value, None, words, tuple(beside.items()))


ROWS_READ = 3


def double(row: Any) -> Any:
    return row


def alone() -> None:
    pass


def yields() -> Any:
    yield 1


def reaches_out(row: Any = ROWS_READ) -> Any:
    def inside() -> Any:
        return json.dumps(double(row))

    return inside()


@contextmanager
def wrapped() -> Any:
    yield 1


def stands_alone(rows: Path | None = None) -> Any:
    import json

    global kept
    kept = [json.dumps(str(row)) for row in range(3)]
    return stands_alone if rows else kept


T, L, INSTRUCT, CHAT = TorchTuneConfig, LoraConfig, TorchTuneInstructDataset, TorchTuneChatDataset
F, Z, A, P = FsdpConfig, ZeroConfig, AdapterConfig, PrefixConfig
HYBRID = ShardingStrategy.HYBRID_SHARD
SHARDED = {"dp_replicate": 1, "dp_shard": -1, "reshard": "always"}
PICTURES, FUNCTION = TorchTuneMultimodalDataset, CustomTrainer
ROWS = [
    effect(T, "dtype", "bf16", "config.train.precision", "bf16"),
    effect(T, "dtype", DataType.FP32, "config.train.precision", "fp32"),
    effect(T, "dtype", "FP32", "config.train.precision", "fp32"),
    refusal(T, "dtype", "bf61", 'dtype: "bf61" is not bf16 or fp32; did you mean "bf16"?'),
    refusal(T, "dtype", 16, "dtype: 16 is not text"),
    effect(T, "batch_size", 8, "config.train.rows_per_step", 8),
    refusal(T, "batch_size", 0, "batch_size: must be more than 0, not 0"),
    refusal(T, "batch_size", "8", 'batch_size: "8" is not a whole number'),
    refusal(T, "batch_size", True, "batch_size: true is not a whole number"),
    effect(T, "epochs", 3, "config.train.epochs", 3),
    refusal(T, "epochs", 0, "epochs: must be more than 0, not 0"),
    effect(T, "loss", Loss.CEWithChunkedOutputLoss, "config.train.rows_per_step", 32),  # what every step computes
    effect(T, "loss", "torchtune.modules.loss.CEWithChunkedOutputLoss", "config.train.epochs", 1),
    refusal(T, "loss", "torch.nn.MSELoss", "loss: "),
    effect(T, "num_nodes", 2, "num_nodes", 2),
    refusal(T, "num_nodes", 10**9, "num_nodes: must be at most 100,000, not 1000000000"),
    refusal(T, "num_nodes", 0, "num_nodes: must be at least 1, not 0"),
    effect(T, "peft_config", L(), "config.adapter", {"kind": "lora", "target": ["q_proj", "v_proj", "o_proj"]}),
    refusal(T, "peft_config", {"lora_rank": 8}, "peft_config: a mapping of keys to values is not a LoraConfig"),
    effect(T, "dataset_preprocess_config", INSTRUCT(), "config.data.train.0.format", "instruct"),
    refusal(T, "dataset_preprocess_config", "alpaca", 'dataset_preprocess_config: "alpaca" is not a TorchTune'),
    effect(T, "resources_per_node", {"gpu": 2, "memory": "64Gi"}, "resources_per_node", {"gpu": 2, "memory": "64Gi"}),
    effect(T, "resources_per_node", {"nvidia.com/gpu": "2"}, "nproc_per_node", 2),
    effect(T, "resources_per_node", {"gpu": 0}, "nproc_per_node", 1),
    refusal(T, "resources_per_node", {"gpu": 0.5}, "resources_per_node.gpu: 0.5 is not a whole number of GPUs"),
    refusal(T, "resources_per_node", {"memory": "lots"}, 'resources_per_node.memory: "lots" is not a quantity'),
    effect(T, "num_procs_per_node", 2, "nproc_per_node", 2),
    effect(T, "learning_rate", 0.0, "config.optimizer.learning_rate", 0.0),
    refusal(T, "learning_rate", -1.0, "learning_rate: must be at least 0, not -1"),
    refusal(T, "learning_rate", float("nan"), "learning_rate: nan is not a number"),
    effect(T, "weight_decay", 0.1, "config.optimizer.weight_decay", 0.1),
    effect(T, "optimizer", "sgd", "config.optimizer", {"name": "sgd", "learning_rate": 2e-5}),
    refusal(T, "optimizer", "adam", 'optimizer: "adam" is not adamw, '),
    effect(T, "lr_scheduler", "cosine", "config.schedule", {"name": "cosine"}),
    refusal(T, "lr_scheduler", "cosin", 'lr_scheduler: "cosin" is not constant, '),
    effect(T, "num_warmup_steps", 0, "config.schedule", {"warmup": 0}),
    effect(T, "gradient_accumulation_steps", 4, "config.train.rows_per_step", 128),
    effect(T, "gradient_accumulation_steps", 4, "config.train.rows_per_step", 8, batch_size=2),
    refusal(T, "gradient_accumulation_steps", 0, "gradient_accumulation_steps: must be at least 1, not 0"),
    effect(T, "max_steps", 5, "config.train", {"rows_per_step": 32, "steps": 5}),
    refusal(T, "max_steps", 5, "max_steps: excludes epochs", epochs=1),
    effect(T, "max_seq_len", 128, "config.data.sequence_length", 128),
    effect(T, "packed", False, "config.data.packing", False),
    effect(T, "shuffle", False, "config.data.shuffle", False),
    effect(T, "seed", 0, "config.seed", 0),
    effect(T, "clip_grad_norm", 0.5, "config.train.max_gradient_norm", 0.5),
    effect(T, "clip_grad_norm", 0, "config.train.max_gradient_norm", None),
    effect(T, "compile", True, "config.train.compile", True),
    effect(T, "enable_activation_checkpointing", True, "config.train.activation_checkpointing", "full"),
    effect(T, "enable_activation_checkpointing", False, "config.train.activation_checkpointing", "off"),
    effect(T, "enable_activation_offloading", True, "config.train.activation_checkpointing", "offloaded"),
    refusal(
        *(T, "enable_activation_offloading", True, "enable_activation_offloading: needs the layers recomputed"),
        enable_activation_checkpointing=False,
    ),
    effect(T, "data_parallel_replicate_dim", 2, "config.parallel", {"dp_replicate": 2}, num_procs_per_node=4),
    effect(T, "data_parallel_shard_dim", 4, "config.parallel", {"dp_shard": 4}, num_procs_per_node=4),
    refusal(T, "data_parallel_shard_dim", 3, "shard_dim: dp_shard 3 takes 3, not 4", num_procs_per_node=4),
    refusal(T, "data_parallel_shard_dim", 0, "data_parallel_shard_dim: must be 1 or more, or -1"),
    effect(T, "tensor_parallel_dim", 2, "config.parallel", {"tp": 2}, num_nodes=2),
    refusal(T, "tensor_parallel_dim", 3, "tensor_parallel_dim: tp 3 does not divide 4", num_procs_per_node=4),
    effect(T, "context_parallel_dim", 2, "config.parallel", {"cp": 2}, num_nodes=2),
    effect(T, "fsdp_cpu_offload", True, "config.parallel.cpu_offload", True),
    effect(T, "device", "cpu", "config.train.device", "cpu"),
    effect(T, "tokenizer", "hf/other", "config.tokenizer", "hf/other"),
    refusal(T, "tokenizer", "", "tokenizer: is empty"),
    refusal(T, "chat_template", "nowhere.jinja", 'chat_template: "nowhere.jinja" cannot be read: No such file'),
    effect(T, "validation_fraction", 0.1, "config.data.validation_fraction", 0.1),
    refusal(T, "validation_fraction", 0, "validation_fraction: must be more than 0"),
    effect(T, "save_every_n_steps", 10, "config.checkpoint.every", 10),
    effect(T, "run_val_every_n_steps", 10, "config.evaluation.every", 10),
    effect(T, "log_every_n_steps", 2, "config.report.every", 2),
    # adapters
    effect(L, "apply_lora_to_mlp", True, "config.adapter.target", ["q_proj", "v_proj", "o_proj", "mlp"]),
    effect(L, "apply_lora_to_mlp", False, "config.adapter.target", ["q_proj", "v_proj", "o_proj"]),
    effect(L, "apply_lora_to_output", True, "config.adapter.target", ["q_proj", "v_proj", "o_proj", "unembed"]),
    effect(L, "lora_attn_modules", ["q_proj", "k_proj"], "config.adapter.target", ["q_proj", "k_proj"]),
    effect(L, "lora_attn_modules", None, "config.adapter.target", ["q_proj", "v_proj", "o_proj"]),
    effect(L, "lora_attn_modules", [], "config.adapter.target", ["mlp"], apply_lora_to_mlp=True),
    refusal(L, "lora_attn_modules", [], "lora_attn_modules: leaves nothing to adapt"),
    refusal(L, "lora_attn_modules", ["qproj"], 'modules.0: "qproj" is no projection of attention; did you mean'),
    refusal(L, "lora_attn_modules", ["q_proj", 7], "lora_attn_modules.1: 7 is not text"),
    effect(L, "lora_rank", 4, "config.adapter.rank", 4),
    refusal(L, "lora_rank", 0, "lora_rank: must be more than 0, not 0"),
    effect(L, "lora_alpha", 8, "config.adapter.alpha", 8),
    effect(L, "lora_dropout", 0.0, "config.adapter.dropout", 0.0),
    refusal(L, "lora_dropout", 1.0, "lora_dropout: must be less than 1, not 1"),
    effect(L, "quantize_base", False, "recipe", "lora_finetune_single_device"),
    effect(L, "quantize_base", True, "config.adapter.quantize", "nf4"),
    effect(L, "use_dora", False, "config.adapter.dora", False),
    effect(L, "use_dora", True, "config.adapter.dora", True),
    # adapters beside text
    effect(A, "adapter_len", 4, "config.adapter", {"kind": "adaption_prompt", "adapter_len": 4}),
    effect(A, "adapter_layers", 3, "config.adapter.adapter_layers", 3),
    refusal(A, "adapter_layers", 0, "peft_config.adapter_layers: must be more than 0"),
    effect(P, "num_virtual_tokens", 4, "config.adapter", {"kind": "prefix", "num_virtual_tokens": 4}),
    refusal(P, "num_virtual_tokens", 0, "peft_config.num_virtual_tokens: must be more than 0"),
    # who holds what of the model
    effect(T, "fsdp_config", F(), "config.train.activation_checkpointing", "full"),
    refusal(T, "fsdp_config", F(), "config.dtype: excludes fsdp_config", dtype="bf16"),
    refusal(T, "fsdp_config", F(), "data_parallel_shard_dim: excludes fsdp_config", data_parallel_shard_dim=2),
    refusal(T, "fsdp_config", F(), "zero_config: excludes fsdp_config", zero_config=Z()),
    refusal(T, "fsdp_config", {}, "fsdp_config: a mapping of keys to values is not a FsdpConfig"),
    effect(T, "zero_config", Z(stage=3), "config.parallel.reshard", "always"),
    effect(T, "enable_activation_checkpointing", False, "config.parallel.dp_shard", 1, zero_config=Z()),
    effect(F, "mixed_precision", True, "config.train.precision", "bf16"),
    effect(F, "mixed_precision", False, "config.train.precision", "fp32"),
    refusal(F, "use_fp16", True, "fsdp_config.use_fp16: fp16 is not offered"),
    effect(F, "use_fp16", False, "config.train.precision", "bf16"),
    effect(F, "fsdp_cpu_offload", True, "config.parallel.cpu_offload", True),
    refusal(F, "fsdp_cpu_offload", True, "fsdp_cpu_offload: keeps shards", sharding_strategy="NO_SHARD"),
    effect(F, "sharding_strategy", "FULL_SHARD", "config.parallel", SHARDED),
    effect(F, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP, "config.parallel.reshard", "never"),
    effect(F, "sharding_strategy", "NO_SHARD", "config.parallel", {"dp_replicate": -1, "dp_shard": 1}),
    effect(F, "sharding_strategy", "HYBRID_SHARD", "config.parallel", SHARDED | {"dp_replicate": -1, "dp_shard": 4}),
    effect(F, "sharding_strategy", "_HYBRID_SHARD_ZERO2", "config.parallel.reshard", "never"),
    refusal(F, "sharding_strategy", "FULL_SHRAD", 'sharding_strategy: "FULL_SHRAD" is not FULL_SHARD or '),
    effect(F, "hsdp", True, "config.parallel.dp_shard", 2, sharding_strategy="HYBRID_SHARD", sharding_group_size=2),
    refusal(F, "hsdp", True, "fsdp_config.hsdp: needs a hybrid strategy, not FULL_SHARD", sharding_group_size=2),
    refusal(F, "hsdp", True, "fsdp_config.hsdp: needs the size of a group", sharding_strategy="HYBRID_SHARD"),
    effect(F, "sharding_group_size", 4, "config.parallel.dp_replicate", -1, hsdp=True, sharding_strategy=HYBRID),
    refusal(F, "sharding_group_size", 2, "sharding_group_size: needs hsdp", sharding_strategy="HYBRID_SHARD"),
    refusal(F, "sharding_group_size", -2, "sharding_group_size: must be at least 0"),
    refusal(F, "sharding_group_size", 3, "takes 3, not 8", hsdp=True, sharding_strategy=HYBRID, replica_group_size=1),
    effect(F, "replica_group_size", 2, "config.parallel.dp_shard", -1, sharding_strategy="HYBRID_SHARD", hsdp=True),
    effect(F, "checkpoint_type", StateDictType.SHARDED_STATE_DICT, "config.train.precision", "bf16"),
    refusal(F, "checkpoint_type", "FULL_STATE_DICT", "checkpoint_type: FULL_STATE_DICT is not offered"),
    refusal(F, "checkpoint_type", "LOCAL_STATE_DICT", "checkpoint_type: LOCAL_STATE_DICT is not offered"),
    effect(F, "fsdp_activation_checkpointing", True, "config.train.activation_checkpointing", "full"),
    effect(F, "fsdp_activation_checkpointing", False, "config.train.activation_checkpointing", "off"),
    effect(Z, "stage", 0, "config.parallel", {"dp_replicate": -1, "dp_shard": 1}),
    refusal(Z, "stage", 1, "zero_config.stage: FSDP2 has no equal of stage 1"),
    effect(Z, "stage", 2, "config.parallel", SHARDED | {"reshard": "never"}),
    effect(Z, "stage", 3, "config.parallel", SHARDED),
    refusal(Z, "stage", 4, "zero_config.stage: there is no stage 4"),
    effect(Z, "zero_cpu_offload", True, "config.parallel.cpu_offload", True, stage=3),
    refusal(Z, "zero_cpu_offload", True, "zero_cpu_offload: keeps shards in the host's memory"),
    refusal(Z, "checkpoint_type", "FULL_STATE_DICT", "checkpoint_type: FULL_STATE_DICT is not offered"),
    effect(Z, "mixed_precision", False, "config.train.precision", "fp32"),
    refusal(Z, "use_fp16", True, "zero_config.use_fp16: fp16 is not offered"),
    # rows with a prompt and an answer
    effect(INSTRUCT, "source", DataFormat.PARQUET, "config.data.train.0.kind", "parquet"),
    effect(INSTRUCT, "source", "json", "config.data.train.0.kind", "json"),
    effect(INSTRUCT, "source", "CSV", "config.data.train.0.kind", "csv"),
    refusal(INSTRUCT, "source", DataFormat.XML, "source: XML cannot be read; convert"),
    refusal(INSTRUCT, "source", "parket", 'source: "parket" is not json, csv'),
    effect(INSTRUCT, "split", "train[:10%]", "config.data.train.0.split", "train[:10%]"),
    refusal(INSTRUCT, "split", "train[:1", 'split: "train[:1" is no split; write train, train[:10%]'),
    effect(INSTRUCT, "train_on_input", True, "config.data.train.0.train_on_input", True),
    effect(INSTRUCT, "new_system_prompt", "yes: [no] 1e3", "config.data.train.0.system_prompt", "yes: [no] 1e3"),
    effect(INSTRUCT, "column_map", {"input": "q"}, "config.data.train.0.columns.completion", "output"),
    effect(INSTRUCT, "column_map", {"instruction": "q"}, "config.data.train.0.columns", {"instruction": "q"}),
    effect(INSTRUCT, "column_map", {}, "config.data.train.0", {"path": "dataset", "format": "instruct"}),
    refusal(INSTRUCT, "column_map", {"question": "q"}, "column_map.question: is no column of this format"),
    effect(INSTRUCT, "template", "plain", "config.data.train.0.options", {"template": "plain"}),
    refusal(INSTRUCT, "template", "fancy", 'template: "fancy" is neither chat nor plain'),
    # conversations
    effect(CHAT, "source", "parquet", "config.data.train.0.kind", "parquet"),
    effect(CHAT, "split", "test", "config.data.train.0.split", "test"),
    effect(CHAT, "conversation_column", "talk", "config.data.train.0.column", "talk"),
    effect(CHAT, "conversation_column", "talk", "config.data.train.0.column", "talk", conversation_style="sharegpt"),
    effect(CHAT, "conversation_style", "sharegpt", "config.data.train.0.column", "conversations"),
    effect(CHAT, "conversation_style", "openai", "config.data.train.0.column", "messages"),
    refusal(CHAT, "conversation_style", "chatml", 'conversation_style: "chatml" is neither openai nor sharegpt'),
    effect(CHAT, "train_on_input", False, "config.data.train.0.train_on_input", False),
    effect(CHAT, "new_system_prompt", "", "config.data.train.0.system_prompt", ""),
    # rows with pictures
    effect(PICTURES, "source", "parquet", "config.data.train.0.kind", "parquet"),
    effect(PICTURES, "split", "train", "config.data.train.0.split", "train"),
    effect(PICTURES, "column_map", {"image": "photo"}, "config.data.train.0.image_column", "photo"),
    effect(PICTURES, "column_map", {"input": "q"}, "config.data.train.0.columns.completion", "output"),
    refusal(PICTURES, "column_map", {"picture": "p"}, "column_map.picture: is no column of this format"),
    effect(PICTURES, "image_dir", "photos", "config.data.train.0.image_root", "dataset/photos"),
    refusal(PICTURES, "image_dir", "../photos", "image_dir: leads out of the data set"),
    effect(PICTURES, "image_tag", "<image>", "config.data.train.0", {"path": "dataset"}),
    refusal(PICTURES, "image_tag", "<img>", 'image_tag: "<img>" is not <image>'),
    # one's own class
    effect(CustomDataset, "name", "my.rows:Mine", "config.data.train.0.format", "my.rows:Mine"),
    refusal(CustomDataset, "name", "nobody", 'name: no data-set class is called "nobody"'),
    refusal(CustomDataset, "name", "a:b:c", 'name: no data-set class is called "a:b:c"'),
    effect(CustomDataset, "source", "csv", "config.data.train.0.kind", "csv", name="m:C"),
    effect(CustomDataset, "split", "dev", "config.data.train.0.split", "dev", name="m:C"),
    effect(CustomDataset, "options", {"n": 0}, "config.data.train.0.options", {"n": 0}, name="m:C"),
    # functions and containers
    effect(FUNCTION, "func", double, "function.name", "double", func_args={"row": 1}),
    refusal(FUNCTION, "func", lambda: None, "trainer.func: is no function with a name of its own"),
    refusal(FUNCTION, "func", yields, "trainer.func: yields yields, and does nothing when it is called"),
    refusal(FUNCTION, "func", wrapped, "trainer.func: wrapped is wrapped by a decorator"),
    refusal(FUNCTION, "func", reaches_out, "trainer.func: uses ROWS_READ, double, json of the module around it"),
    effect(FUNCTION, "func", stands_alone, "function.name", "stands_alone"),
    refusal(FUNCTION, "func", "double", 'trainer.func: "double" is not a '),
    refusal(FUNCTION, "func", print, "trainer.func: is no function with a name of its own"),
    refusal(FUNCTION, "func", DataFormat.JSON.startswith, "trainer.func: is no function"),
    refusal(FUNCTION, "func", double, "trainer.func_args: do not fit double: missing a required argument: 'row'"),
    refusal(FUNCTION, "func_args", {"raw": 1}, "trainer.func_args: do not fit double", func=double),
    refusal(FUNCTION, "env", {"A": "a\0b"}, "trainer.env.A: holds a NUL", func=alone),
    effect(FUNCTION, "func_args", {"row": [0, None, "x"]}, "function.args", {"row": [0, None, "x"]}, func=double),
    refusal(FUNCTION, "func_args", {"row": {1, 2}}, "func_args.row: set cannot travel as JSON", func=double),
    refusal(FUNCTION, "func_args", {"row": (1,)}, "trainer.func_args.row: tuple cannot travel", func=double),
    refusal(FUNCTION, "func_args", {"row": math.nan}, "trainer.func_args.row: nan cannot travel", func=double),
    refusal(FUNCTION, "packages_to_install", ["einops", " "], "packages_to_install.1: is empty", func=alone),
    refusal(FUNCTION, "image", "mine:1", "trainer.image: jobs of this machine run in no container", func=alone),
    effect(FUNCTION, "packages_to_install", ["einops"], "function.packages", ("einops",), func=alone),
    effect(FUNCTION, "pip_index_urls", ["http://a", "b"], "function.pip_index_urls", ("http://a", "b"), func=alone),
    effect(FUNCTION, "pip_index_url", "https://a", "function.pip_index_urls", ("https://a",), func=alone),
    effect(FUNCTION, "num_nodes", 3, "num_nodes", 3, func=alone),
    effect(FUNCTION, "resources_per_node", {"gpu": 2}, "nproc_per_node", 2, func=alone),
    effect(FUNCTION, "env", {"A": ""}, "env", {"A": ""}, func=alone),
    refusal(FUNCTION, "env", {"PET_NNODES": "2"}, "trainer.env.PET_NNODES: is set by whoever starts", func=alone),
    refusal(FUNCTION, "env", {"A-B": "2"}, 'trainer.env: "A-B" is not a name of a variable', func=alone),
    refusal(FUNCTION, "env", {"A": 2}, "trainer.env.A: 2 is not text", func=alone),
    *(
        refusal(CustomTrainerContainer, field, value, "trainer.image: jobs of this machine", image="mine:1")
        for field, value in {"image": "i", "num_nodes": 1, "resources_per_node": {}, "env": {}}.items()
    ),
    effect(BuiltinTrainer, "config", T(seed=7), "config.seed", 7),
    refusal(BuiltinTrainer, "config", {"seed": 7}, "trainer.config: a mapping of keys to values is not a TorchTune"),
    effect(BuiltinTrainer, "engine", "luthier", "engine", "luthier"),
    refusal(BuiltinTrainer, "engine", "megatron", 'engine: there is no engine "megatron"'),
    effect(BuiltinTrainer, "env", {"A": "b"}, "env", {"A": "b"}),
]  # fmt: skip


def spec_of(client: Any, row: Row) -> Any:
    """The spec of a job that has the row's field set."""
    thing = row.cls(**dict(row.beside) | {row.field: row.value})
    runtime, trainer = RUNTIME, thing
    if row.cls is TorchTuneConfig:
        trainer = BuiltinTrainer(thing)
    elif row.cls in (FsdpConfig, ZeroConfig):
        which = "fsdp_config" if row.cls is FsdpConfig else "zero_config"
        trainer = BuiltinTrainer(TorchTuneConfig(num_nodes=2, num_procs_per_node=4, **{which: thing}))
    elif row.cls in (LoraConfig, AdapterConfig, PrefixConfig):
        trainer = BuiltinTrainer(TorchTuneConfig(peft_config=thing))
    elif row.cls in (INSTRUCT, CHAT, PICTURES, CustomDataset):
        trainer = BuiltinTrainer(TorchTuneConfig(dataset_preprocess_config=thing))
    elif row.cls in (CustomTrainer, CustomTrainerContainer):
        runtime = "torch-distributed"
    return client.train(runtime, trainer=trainer, dry_run=True)


def at(thing: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(thing, list):
            thing = thing[int(part)]
        else:
            thing = thing[part] if isinstance(thing, dict) else getattr(thing, part)
    return thing


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_field(client, row):
    if row.at is None:
        with pytest.raises(ConfigError) as caught:
            spec_of(client, row)
        assert row.expected in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    else:
        found = at(spec_of(client, row), row.at)
        assert found == row.expected
        assert type(found) is type(row.expected)


@pytest.mark.parametrize(
    "cls",
    [T, L, F, Z, A, P, INSTRUCT, CHAT, PICTURES, CustomDataset, CustomTrainer, CustomTrainerContainer, BuiltinTrainer],
    ids=lambda c: c.__name__,
)
def test_no_field_is_without_a_row(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    assert fields == {row.field for row in ROWS if row.cls is cls}


PLACES: list[tuple[type, str, Any, str, Any]] = [
    (DatasetInitializer, "storage_uri", "https://h/a.csv", "dataset.env", {"STORAGE_URI": "https://h/a.csv"}),
    (DatasetInitializer, "ignore_patterns", ["*.md", "*.bin"], "dataset.env.IGNORE_PATTERNS", "*.md,*.bin"),
    (DatasetInitializer, "access_token", "hush", "dataset.secrets", {"ACCESS_TOKEN": "hush"}),
    (HuggingFaceDatasetInitializer, "storage_uri", "a/b/data", "config.data.train.0.path", "dataset/data"),
    (HuggingFaceDatasetInitializer, "ignore_patterns", [], "dataset.env.IGNORE_PATTERNS", ""),
    (HuggingFaceDatasetInitializer, "access_token", "hush", "dataset.secrets", {"ACCESS_TOKEN": "hush"}),
    (S3DatasetInitializer, "storage_uri", "s3://b/v1.0", "config.data.train.0.path", "dataset"),
    (S3DatasetInitializer, "ignore_patterns", ["x"], "dataset.env.IGNORE_PATTERNS", "x"),
    (S3DatasetInitializer, "endpoint", "http://127.0.0.1:9000", "dataset.env.ENDPOINT", "http://127.0.0.1:9000"),
    (S3DatasetInitializer, "access_key_id", "hush", "dataset.secrets.ACCESS_KEY_ID", "hush"),
    (S3DatasetInitializer, "secret_access_key", "hush", "dataset.secrets.SECRET_ACCESS_KEY", "hush"),
    (S3DatasetInitializer, "region", "eu", "dataset.env.REGION", "eu"),
    (S3DatasetInitializer, "role_arn", "arn:x", "dataset.env.ROLE_ARN", "arn:x"),
    (ModelInitializer, "storage_uri", "gs://b/tiny.gguf", "config.model", "model/tiny.gguf"),
    (ModelInitializer, "ignore_patterns", None, "model.env", {"STORAGE_URI": "s3://b/p"}),
    (ModelInitializer, "access_token", "hush", "model.secrets", {"ACCESS_TOKEN": "hush"}),
    (HuggingFaceModelInitializer, "storage_uri", "a/b", "model.env.STORAGE_URI", "hf://a/b"),
    (HuggingFaceModelInitializer, "ignore_patterns", ["x"], "model.env.IGNORE_PATTERNS", "x"),
    (HuggingFaceModelInitializer, "access_token", "hush", "model.secrets", {"ACCESS_TOKEN": "hush"}),
    (S3ModelInitializer, "storage_uri", "s3://b/tiny", "config.model", "model"),
    (S3ModelInitializer, "ignore_patterns", [], "model.env.IGNORE_PATTERNS", ""),
    (S3ModelInitializer, "endpoint", "http://h", "model.env.ENDPOINT", "http://h"),
    (S3ModelInitializer, "access_key_id", "hush", "model.secrets.ACCESS_KEY_ID", "hush"),
    (S3ModelInitializer, "secret_access_key", "hush", "model.secrets.SECRET_ACCESS_KEY", "hush"),
    (S3ModelInitializer, "region", "eu", "model.env.REGION", "eu"),
    (S3ModelInitializer, "role_arn", "arn:x", "model.env.ROLE_ARN", "arn:x"),
    (ModelExporter, "storage_uri", "hf://me/tuned", "exporter.env.STORAGE_URI", "hf://me/tuned"),
    (ModelExporter, "form", "merged", "exporter.env.EXPORT_FORM", "merged"),
    (ModelExporter, "access_token", "hush", "exporter.secrets", {"ACCESS_TOKEN": "hush"}),
    (ModelExporter, "endpoint", "http://h", "exporter.env.ENDPOINT", "http://h"),
    (ModelExporter, "access_key_id", "hush", "exporter.secrets.ACCESS_KEY_ID", "hush"),
    (ModelExporter, "secret_access_key", "hush", "exporter.secrets.SECRET_ACCESS_KEY", "hush"),
    (ModelExporter, "region", "eu", "exporter.env.REGION", "eu"),
    (ModelExporter, "role_arn", "arn:x", "exporter.env.ROLE_ARN", "arn:x"),
]  # fmt: skip


@pytest.mark.parametrize("row", PLACES, ids=lambda row: f"{row[0].__name__}.{row[1]}={row[2]!r}")
def test_a_field_of_a_place(client, row):
    cls, field, value, path, expected = row
    usual = "a/b" if cls in (HuggingFaceDatasetInitializer, HuggingFaceModelInitializer) else "s3://b/p"
    half = {"access_key_id": "secret_access_key", "secret_access_key": "access_key_id"}.get(field)
    thing = cls(**{"storage_uri": usual, field: value} | ({half: "hush"} if half is not None else {}))
    asked: dict[str, Any] = {"exporter": thing}
    if cls is not ModelExporter:
        asked = {"initializer": Initializer(**{"dataset" if "Dataset" in cls.__name__ else "model": thing})}
    spec = client.train(RUNTIME, **asked, dry_run=True)
    assert at(spec, path) == expected
    assert "hush" not in repr(spec)


@pytest.mark.parametrize("cls", sorted({row[0] for row in PLACES}, key=str), ids=lambda cls: cls.__name__)
def test_no_field_of_a_place_is_without_a_row(cls):
    assert {field.name for field in dataclasses.fields(cls)} == {row[1] for row in PLACES if row[0] is cls}


def test_a_chat_template_travels_along(client, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    config = TorchTuneConfig(chat_template=str(tmp_path / "mine.jinja"))
    for given in (config, LuthierConfig(data={"chat_template": str(tmp_path / "mine.jinja")})):
        spec = client.train(RUNTIME, trainer=BuiltinTrainer(given), dry_run=True)
        assert spec.files == {"chat_template.jinja": "{{ messages }}"}
        assert spec.config["data"]["chat_template"] == "chat_template.jinja"


@pytest.mark.parametrize("path", ["rows.jsonl", "dataset/rows.jsonl", "*.jsonl"])
def test_rows_that_are_not_there(client, path):
    with pytest.raises(ConfigError) as caught:
        client.train(RUNTIME, trainer=BuiltinTrainer(LuthierConfig(data=path)), dry_run=True)
    assert f'trainer.config.data.train.0.path: there is no "{path}" here' in str(caught.value)


def test_arguments_within_one_another(client):
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ConfigError, match=r"trainer.func_args.row: list cannot travel as JSON"):
        client.train(trainer=CustomTrainer(func=double, func_args={"row": nested}), dry_run=True)


def test_all_that_is_wrong_is_said_at_once(client):
    config = TorchTuneConfig(batch_size=0, epochs=-1.0, seed=-1, peft_config=LoraConfig(lora_rank=0))
    with pytest.raises(ConfigError) as caught:
        client.train(RUNTIME, trainer=BuiltinTrainer(config), dry_run=True)
    told = sorted(line.partition(":")[0] for line in str(caught.value).splitlines())
    places = ["batch_size", "epochs", "peft_config.lora_rank", "seed"]
    assert told == [f"trainer.config.{place}" for place in places]
