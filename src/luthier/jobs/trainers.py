"""What a job's nodes do, by Kubeflow's and KEP-2401's names and fields. Plain data, as in `types.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from luthier.jobs.sharding import FsdpConfig, ZeroConfig
from luthier.jobs.types import Initializer, Runtime, fields_named

if TYPE_CHECKING:
    from luthier.jobs.config import LuthierConfig


class DataType(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class DataFormat(StrEnum):
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    TEXT = "text"
    XML = "xml"


class Loss(StrEnum):
    """Cross-entropy in chunks, which is what every step computes, never holding all logits at once."""

    CEWithChunkedOutputLoss = "torchtune.modules.loss.CEWithChunkedOutputLoss"


@fields_named
@dataclass
class CustomTrainer:
    """A training function of one's own, run on every process under torchrun.

    Attributes:
        func: must stand on its own: its imports inside it.
        func_args: its keyword arguments, of types that JSON has.
        image: container image, instead of the runtime's.
        packages_to_install: by pip, before it runs.
        pip_index_urls: where from; the first is the index, the others extra ones.
        resources_per_node: {"gpu": 4, "cpu": 5, "memory": "10G"}.
        env: environment of the nodes.
        pip_index_url: KEP-2401's name for one index.
    """

    func: Callable[..., Any]
    func_args: dict[str, Any] | None = None
    image: str | None = None
    packages_to_install: list[str] | None = None
    pip_index_urls: list[str] | None = field(default=None, repr=False)
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = field(default=None, repr=False)
    pip_index_url: str | None = field(default=None, repr=False)


@fields_named
@dataclass
class CustomTrainerContainer:
    """A container image (Kubernetes only), with its own entry point or option `TrainerCommand`."""

    image: str
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = field(default=None, repr=False)


@fields_named
@dataclass
class TorchTuneInstructDataset:
    """Rows with a prompt and an answer.

    Attributes:
        source: which kind of files of the data set is read; all of the most frequent kind when left out.
        split: "train", or a part of it ("train[:10%]").
        train_on_input: also train on the prompt.
        new_system_prompt: a system message before every row.
        column_map: {"input": column, "output": column}; or by Luthier's own names (instruction, prompt, ...).
        template: how a mapped input and output are laid out: "chat", by the model's chat template, or "plain", as one
            text; chat when left out.
    """

    source: DataFormat | str | None = None
    split: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[str, str] | None = None
    template: str | None = None


@fields_named
@dataclass
class TorchTuneChatDataset:
    """Rows with a conversation.

    Attributes:
        conversation_column: the column of the messages.
        conversation_style: "openai" (role, content) or "sharegpt" (from, value).
    """

    source: DataFormat | str | None = None
    split: str | None = None
    conversation_column: str | None = None
    conversation_style: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None


@fields_named
@dataclass
class TorchTuneMultimodalDataset:
    """Rows with pictures.

    Attributes:
        column_map: {"input": column, "output": column, "image": column}; conversations with an image column otherwise.
        image_dir: directory in the data set that paths of images start from; the rows' own when left out.
        image_tag: "<image>", which stands for an image in every model's rows.
    """

    source: DataFormat | str | None = None
    split: str | None = None
    column_map: dict[str, str] | None = None
    image_dir: str | None = None
    image_tag: str | None = None


@fields_named
@dataclass
class CustomDataset:
    """Rows read by a class of one's own, which `register_dataset` names.

    Attributes:
        name: under which it is registered.
        options: handed to the class.
    """

    name: str
    source: DataFormat | str | None = None
    split: str | None = None
    options: dict[str, Any] | None = None


DatasetConfig = TorchTuneInstructDataset | TorchTuneChatDataset | TorchTuneMultimodalDataset | CustomDataset


@fields_named
@dataclass
class LoraConfig:
    """Low-rank adapters.

    Attributes:
        lora_attn_modules: of q_proj, k_proj, v_proj and output_proj.
    """

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_attn_modules: list[str] | None = field(default_factory=lambda: ["q_proj", "v_proj", "output_proj"])
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    quantize_base: bool | None = None
    use_dora: bool | None = None


@fields_named
@dataclass
class AdapterConfig:
    """Prompts that the upper layers attend to beside the text, behind a gate (LLaMA-Adapter).

    Attributes:
        adapter_len: prompts of each layer.
        adapter_layers: how many of the uppermost layers have them; all when left out.
    """

    adapter_len: int = 10
    adapter_layers: int | None = None


@fields_named
@dataclass
class PrefixConfig:
    """Keys and values that stand before every text in every layer (prefix tuning)."""

    num_virtual_tokens: int = 30


PeftConfig = LoraConfig | PrefixConfig | AdapterConfig


@fields_named
@dataclass
class TorchTuneConfig:
    """Parameters of a fine-tune. The first eight are Kubeflow's; the others, by torchtune's names, are what it lacks.

    Attributes:
        dtype: of weights and arithmetic.
        batch_size: rows of one optimizer step, over all processes.
        epochs: passes over the rows.
        resources_per_node: {"gpu": 4, "cpu": 8, "memory": "64Gi"}.
        num_procs_per_node: processes of a node; one for each GPU it asks for, else as many as its runtime says.
        gradient_accumulation_steps: batches of one optimizer step, which then takes batch_size times as many rows.
        max_steps: optimizer steps; excludes epochs.
        max_seq_len: tokens of the longest row, and what rows are packed to.
        packed: lay several rows end to end, kept apart.
        optimizer: "adamw", "sgd", ... as in a Luthier YAML.
        lr_scheduler: "constant", "linear", "cosine" or "wsd".
        num_warmup_steps: below 1 it is a share of all steps.
        clip_grad_norm: 0 for no clipping.
        tokenizer: another one than the model's: a Hub id or a directory.
        chat_template: a Jinja file on this machine, which travels along.
        save_every_n_steps, run_val_every_n_steps, log_every_n_steps: checkpoints, measurements, rows of metrics.
        validation_fraction: the share of rows that is held out.
        fsdp_config, zero_config: how processes share the model, by KEP-2401's fields; at most one of them.
    """

    dtype: DataType | str | None = None
    batch_size: int | None = None
    epochs: float | None = None
    loss: Loss | str | None = None
    num_nodes: int | None = None
    peft_config: PeftConfig | None = None
    dataset_preprocess_config: DatasetConfig | None = None
    resources_per_node: dict[str, Any] | None = None
    num_procs_per_node: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    lr_scheduler: str | None = None
    num_warmup_steps: float | None = None
    gradient_accumulation_steps: int | None = None
    max_steps: int | None = None
    max_seq_len: int | None = None
    packed: bool | None = None
    shuffle: bool | None = None
    seed: int | None = None
    clip_grad_norm: float | None = None
    compile: bool | None = None
    enable_activation_checkpointing: bool | None = None
    enable_activation_offloading: bool | None = None
    data_parallel_replicate_dim: int | None = None
    data_parallel_shard_dim: int | None = None
    tensor_parallel_dim: int | None = None
    context_parallel_dim: int | None = None
    fsdp_cpu_offload: bool | None = None
    device: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    validation_fraction: float | None = None
    save_every_n_steps: int | None = None
    run_val_every_n_steps: int | None = None
    log_every_n_steps: int | None = None
    fsdp_config: FsdpConfig | None = None
    zero_config: ZeroConfig | None = None


@fields_named
@dataclass
class BuiltinTrainer:
    """A fine-tune that only needs parameters.

    Attributes:
        config: by Kubeflow's names, or every field of a Luthier YAML.
        engine: who trains: "luthier", or another one that `register_engine` names ("huggingface").
        env: environment of the nodes.
    """

    config: TorchTuneConfig | LuthierConfig = field(default_factory=TorchTuneConfig)
    engine: str = "luthier"
    env: Mapping[str, str] | None = field(default=None, repr=False)


AnyTrainer = BuiltinTrainer | CustomTrainer | CustomTrainerContainer


@fields_named
@dataclass
class TrainJobTemplate:
    """What `train(**template)` takes, to be kept and used again."""

    trainer: AnyTrainer | None = None
    runtime: str | Runtime | None = None
    initializer: Initializer | None = None

    def keys(self) -> list[str]:
        return ["trainer", "runtime", "initializer"]

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)
