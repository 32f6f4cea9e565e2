"""A pydantic model for each key of a run's YAML, in a user's words; everything but model and data has a default."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    NonPositiveFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from luthier.config.base import Fraction, PathText, Section, one_or_many


def _no_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be 1 or more, or -1 for whatever ranks are left")
    return value


class SourceConfig(Section):
    """Where rows come from, and how to read them. A bare path means `{path: ...}`."""

    shorthand = "path"

    path: PathText
    """A file (jsonl, json, csv, parquet, arrow, txt; also .gz, .zst), a directory, a glob, or hf://owner/name."""
    subset: str | None = None
    """The configuration of a Hub data set."""
    split: str = "train"
    """Of a Hub data set, or of a directory whose files are named after splits; or a part of one: train[:10%]."""
    kind: Literal["json", "csv", "parquet", "arrow", "text"] | None = None
    """Which files of a directory are read; all when left out."""
    format: str | None = None
    """text, instruct, chat, random, preference, ranked, unpaired, prompt, or package.module:Class; told from the
    columns when left out."""
    column: str | None = None
    """The column that holds the text (format text) or the messages (format chat)."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column map of format instruct: any of instruction, input, output, prompt, completion, system -> your column."""
    system_prompt: str | None = None
    """A system message for rows that have none (instruct and chat)."""
    train_on_input: bool = False
    """Also train on what the model is given, not only on what it should answer (instruct and chat)."""
    weight: PositiveFloat | None = None
    """This source's share of a mixture, relative to the others (1 where another names one); without any, all rows."""
    rows: PositiveInt | None = None
    """Take the first N rows only; of format random: how many rows to make (default 1,000)."""
    image_column: str | None = None
    """The column that holds a row's images: paths, bytes or addresses, one or a list; images or image when left out."""
    image_root: PathText | None = None
    """Directory that paths of images start from and stay in; the data file's own when left out."""
    allow_urls: bool = False
    """Fetch images that rows name by http or https; each once, while rows are tokenised."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of a format of one's own; text files: rows (paragraph, line, file); instruct: template (chat, plain); random."""


Sources = Annotated[list[SourceConfig], BeforeValidator(one_or_many), Field(min_length=1)]


class DataConfig(Section):
    """What is trained on and measured on. `data: rows.jsonl` means `data: {train: {path: rows.jsonl}}`."""

    shorthand = "train"

    train: Sources | None = None
    """One source or several mixed by weight."""
    validation: Sources | None = None
    """Rows to measure on; never trained on."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Hold out this share of the training rows instead of naming validation rows."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Longest row in tokens, and the length that rows are packed to."""
    too_long: Literal["truncate", "drop", "raise", "split"] = "truncate"
    """What happens to a row of more tokens than sequence_length; every such row is counted and said."""
    packing: bool = True
    """Lay several rows end to end, kept apart exactly. Off: every row is computed alone. Same loss either way."""
    shuffle: bool = True
    """A new order each epoch, drawn from the seed."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """What happens to a row that cannot be read; skipped rows are counted and said."""
    streaming: bool = False
    """Read and tokenise while training, for what does not fit on disk or in memory; needs train.steps."""
    shuffle_buffer: PositiveInt = 10_000
    """Rows held for shuffling while streaming."""
    cache: bool = True
    """Keep tokenised rows by content (under LUTHIER_CACHE, else the user's cache directory)."""
    chat_template: PathText | None = None
    """A Jinja file used instead of the tokenizer's own chat template."""
    _kind: str = PrivateAttr("documents")  # see kinds.py

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> DataConfig:
        if self.validation and self.validation_fraction:
            raise ValueError("validation and validation_fraction exclude each other; leave one of them out")
        if self.validation_fraction and self.streaming:
            raise ValueError("validation_fraction needs all rows at once; name validation rows when streaming")
        return self


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    alpha: PositiveFloat | None = None
    """Numerator of the scale alpha / rank (rsLoRA: alpha / sqrt(rank)); 2 x rank when left out."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train each output's length beside the low-rank direction (Liu et al. 2024, https://arxiv.org/abs/2402.09353)."""
    init: str = "default"
    """First values: default, gaussian, orthogonal, pissa, pissa_niter_N (N rounds of a faster SVD), olora; beside a
    quantised base loftq, loftq_iter_N."""
    target: Annotated[list[str], BeforeValidator(one_or_many), Field(min_length=1)] = ["attn", "mlp"]
    """Roles (attn, mlp, experts, unembed, embed, vision, projector), all-linear, names, or patterns of full names."""
    learning_rate_ratio: PositiveFloat | None = None
    """LoRA+: B learns at this multiple of the learning rate (Hayou et al. 2024, https://arxiv.org/abs/2402.12354)."""
    embedding_learning_rate: PositiveFloat = 1.0e-6
    """Of LoRA+: what adapters beside the embedding learn at."""
    train_modules: Annotated[list[str], BeforeValidator(one_or_many)] = []
    """Modules trained in full beside the adapters, by name or regular expression."""
    new_tokens: Annotated[list[str], BeforeValidator(one_or_many)] = []
    """Tokens whose rows of embedding and head train; what the tokenizer lacks is added to it."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the adapters; the base weight's when left out."""
    quantize: Literal["nf4"] | None = None
    """QLoRA: keep the linear layers of the frozen base in four bits; double_quantize their scales in eight."""
    double_quantize: bool = True
    start_from: PathText | None = None
    """A directory with PEFT files (adapter_config.json, adapter_model.safetensors) to go on from."""

    @model_validator(mode="after")
    def _known_beginning(self) -> LoraConfig:
        rounds = r"default|gaussian|orthogonal|olora|pissa(_niter_[1-9]\d?)?|loftq(_iter_[1-9]\d?)?"
        if not re.fullmatch(rounds, self.init):
            known = "default, gaussian, orthogonal, pissa, pissa_niter_N, olora, loftq or loftq_iter_N"
            raise ValueError(f"init {self.init!r} is not {known}")
        if self.init.startswith("loftq") and (self.quantize is None or self.dora):
            raise ValueError(f"init {self.init} begins as what quantisation loses: it needs quantize: nf4, and no dora")
        if self.quantize is not None and self.init.startswith(("pissa", "olora")):
            raise ValueError(f"init {self.init} takes a part out of a base that is not quantised; use loftq beside one")
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"init orthogonal needs an even rank, not {self.rank}")
        return self

    @property
    def begins_as_another(self) -> bool:
        """Whether the model with its new adapter is another than what its files give, be it by rounding: what is
        opened again later has no rows of new tokens, no quantised base, or no part taken out of its weights."""
        return self.quantize is not None or bool(self.new_tokens) or self.init not in ("default", "gaussian")


_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
"""How much of a moment is kept; of one that keeps all, the bias is never corrected, and weights become NaN."""


class _OptimizerBase(Section):
    learning_rate: NonNegativeFloat = 1.0e-4
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices; biases, norms and other vectors are never decayed."""
    in_backward: bool = False
    """Use each gradient as soon as it is there, and free it; needs train.max_gradient_norm: null."""


class AdamWConfig(_OptimizerBase):
    name: Literal["adamw"] = "adamw"
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    epsilon: PositiveFloat = 1.0e-8
    state_dtype: Literal["fp32", "int8"] = "fp32"
    """Dtype of the two moments; int8 is bitsandbytes' 8 bits in blocks (Dettmers et al. 2021)."""


class StochasticAdamWConfig(_OptimizerBase):
    """AdamW on bf16 weights: fp32 arithmetic and gradients, weights rounded stochastically."""

    name: Literal["stochastic_adamw"]
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    epsilon: PositiveFloat = 1.0e-8
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Dtype of the two moments; int8 as of adamw."""


class SGDConfig(_OptimizerBase):
    name: Literal["sgd"]
    momentum: Fraction = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _something_to_look_ahead_with(self) -> SGDConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")
        return self


class AdafactorConfig(_OptimizerBase):
    """torch.optim.Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235)."""

    name: Literal["adafactor"]
    beta2_decay: NonPositiveFloat = -0.8
    clip_threshold: PositiveFloat = 1.0


class MuonConfig(_OptimizerBase):
    """torch.optim.Muon for the hidden matrices, AdamW for everything else."""

    name: Literal["muon"]
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    epsilon: PositiveFloat = 1.0e-8
    adamw_learning_rate: NonNegativeFloat | None = None
    """Learning rate of the AdamW part; the same as learning_rate when left out."""


OptimizerConfig = Annotated[
    AdamWConfig | StochasticAdamWConfig | SGDConfig | AdafactorConfig | MuonConfig, Field(discriminator="name")
]


class ProfileConfig(Section):
    """torch profiler traces of chosen steps, written under RUN/profile/."""

    start: PositiveInt = 3
    """First step traced."""
    steps: PositiveInt = 2
    """How many steps are traced."""


class TrainConfig(Section):
    epochs: PositiveFloat | None = None
    """Passes over the training rows; 1 when neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    rows_per_step: PositiveInt | None = None
    """Rows in a global batch; 16 when neither this nor tokens_per_step is given."""
    tokens_per_step: PositiveInt | None = None
    """Tokens in a global batch: rows are taken while they fit, at least one."""
    precision: Literal["fp32", "bf16"] | None = None
    """Dtype of weights and arithmetic; bf16 where the machine is fast at it, else fp32."""
    max_gradient_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null for no clipping."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does: stop with the culprit named, or skip the step and count it."""
    activation_checkpointing: Literal["off", "full", "selective", "offloaded"] = "off"
    """Recompute layers in the backward pass: none, all, every second one, or all with their inputs kept on the host."""
    compile: bool = False
    """torch.compile, layer by layer."""
    attention: str | None = None
    """Attention implementation; chosen for the device when left out."""
    device: str | None = None
    """cpu, cuda or cuda:1; when left out cuda where there is one, else cpu."""
    threads: PositiveInt | None = None
    """CPU threads; torch's own choice when left out."""
    profile: ProfileConfig | None = None

    @field_validator("precision", mode="before")
    @classmethod
    def _no_fp16(cls, value: Any) -> Any:
        if value in ("fp16", "float16", "half"):
            raise ValueError("fp16 is not offered, since its gradients overflow without loss scaling; use bf16")
        return {"float32": "fp32", "bfloat16": "bf16"}.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_length_and_one_batch(self) -> TrainConfig:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps exclude each other; leave one of them out")
        if self.rows_per_step is not None and self.tokens_per_step is not None:
            raise ValueError("rows_per_step and tokens_per_step exclude each other; leave one of them out")
        return self


Degree = Annotated[int, Field(ge=-1), AfterValidator(_no_zero)]


class ParallelConfig(Section):
    """How many ranks share what; the product of all but ep is the number of processes. -1 fills one degree."""

    dp_replicate: Degree = 1
    """Copies of the model that each read their own rows (HSDP where dp_shard is more than 1)."""
    dp_shard: Degree = -1
    """Ranks that read their own rows and hold a shard of every weight each (FSDP2)."""
    tp: Degree = 1
    """Ranks that share every matrix product (tensor parallel)."""
    cp: Degree = 1
    """Ranks that share every row (context parallel); they hold shards of the weights as dp_shard's do."""
    pp: Degree = 1
    """Stages that the layers are cut into (pipeline parallel)."""
    ep: Degree = 1
    """Ranks that share the experts; taken from dp_shard x cp x tp, a multiple of tp (expert parallel)."""
    sequence_parallel: bool = False
    """Cut norms and residuals along the row between tensor-parallel layers, where the model's plan allows it."""
    reshard: Literal["auto", "always", "never"] = "auto"
    """Give gathered weights back after a layer's forward; auto does, but not with a pipeline, which comes back soon."""
    cpu_offload: bool = False
    """Keep shards of weights, gradients and moments in the host's memory (dp_shard)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v"] = (
        "1f1b"
    )
    """Order of the pipeline's work."""
    stages_per_rank: PositiveInt | None = None
    """Stages that each rank holds under the interleaved schedules; 2 when left out."""

    def reshards(self, pp: int) -> bool:
        """Whether layers give their gathered weights back after the forward, with so many stages of a pipeline: between
        the passes of one microbatch it runs others, and they would be gathered over and over."""
        return self.reshard == "always" or (self.reshard == "auto" and pp == 1)


class MoeConfig(Section):
    """How the experts of a mixture are kept equally busy. Both ways count over the whole global batch."""

    aux_loss: NonNegativeFloat | None = None
    """Coefficient of the model's own load-balancing loss, 0 for none; left out it is added as Transformers does: with
    router_aux_loss_coef of the model's config where that sets output_router_logits."""
    bias_update_rate: PositiveFloat | None = None
    """Move the bias of each expert this far towards balance after every step, as DeepSeek-V3 does (Wang et al. 2024,
    https://arxiv.org/abs/2408.15664)."""


class CheckpointConfig(Section):
    every: PositiveInt | None = None
    """Steps between checkpoints; with neither this nor an interruption, one is written at the end."""
    keep: PositiveInt = 2
    """How many of the newest committed checkpoints stay."""
    keep_best: bool = True
    """Write a checkpoint whenever the validation loss is the lowest so far, and keep that of the lowest."""
    trainable_only: bool | None = None
    """Leave frozen weights out; yes with adapters, no without, when left out."""
    asynchronous: bool = True
    """Write in the background while training goes on."""


class EvaluationConfig(Section):
    every: PositiveInt | None = None
    """Steps between measurements of the validation loss; only at the end when left out."""
    rows: PositiveInt | None = None
    """Measure on the first N validation rows only."""
    early_stopping: PositiveInt | None = None
    """Stop after this many measurements in a row without a lower validation loss."""

    @model_validator(mode="after")
    def _something_to_wait_for(self) -> EvaluationConfig:
        if self.early_stopping is not None and self.every is None:
            raise ValueError("early_stopping needs evaluation.every")
        return self


class ReportConfig(Section):
    trackers: Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]], BeforeValidator(one_or_many)] = []
    """Besides metrics.jsonl, which is always written."""
    project: str = "luthier"
    every: PositiveInt = 1
    """Steps between rows of metrics.jsonl."""


def _no_underflow(value: float) -> float:
    if value < 0.0 or 0.0 < value < 1e-3:
        raise ValueError("must be 0 or at least 0.001; 0 takes the likeliest token")
    return value


class GenerationConfig(Section):
    """How `luthier generate` and `luthier chat` sample."""

    max_new_tokens: PositiveInt = 256
    temperature: Annotated[float, AfterValidator(_no_underflow)] = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
    """0 for no limit."""
