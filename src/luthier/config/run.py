"""The whole YAML of a run on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from luthier.config.adapters import AdapterConfig
from luthier.config.base import PathText, Section, path_text
from luthier.config.kinds import set_kind
from luthier.config.methods import MethodConfig, SftConfig
from luthier.config.schedules import ConstantSchedule, ScheduleConfig
from luthier.config.sections import (
    AdamWConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GenerationConfig,
    LoraConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    TrainConfig,
)


class RunConfig(Section):
    """What a run is. `luthier train RUN/config.yaml` with the resolved config repeats it."""

    model: PathText
    """A Hub id, a directory, a .gguf file, package:NAME/FILE, or debug:TYPE."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    tokenizer: PathText | None = None
    """Another tokenizer than the model's, named as a model is."""
    from_scratch: bool = False
    """Random weights by the model's own initialisation instead of the pretrained ones."""
    trust_remote_code: bool = False
    """Run Python code that a model repository brings along."""
    data: DataConfig
    method: MethodConfig = Field(default_factory=SftConfig)
    """What the training minimises; a bare name is enough: `method: sft`."""
    adapter: AdapterConfig | None = None
    """Leave out for full fine-tuning."""
    optimizer: OptimizerConfig = Field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = Field(default_factory=ConstantSchedule)
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    moe: MoeConfig = Field(default_factory=MoeConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    output: Path = Path("runs/latest")
    """The run directory: config.yaml, metrics.jsonl, log.txt, checkpoints/, export/."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def compares_with_start(self) -> bool:
        """Whether every step asks the model as it was before the first one."""
        method, adapter = self.method, self.adapter
        if method.name == "grpo":
            return method.beta > 0
        reference = getattr(method, "reference", None)
        if reference == "precomputed" and isinstance(adapter, LoraConfig) and adapter.start_from is None:
            # What these begin as cannot be had again later, by opening the model or by switching adapters off.
            lasting = bool(adapter.train_modules) or adapter.init.startswith("loftq")
            return adapter.begins_as_another and lasting
        return bool(reference == "base")

    @field_validator("output", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("is empty; name a directory, . for this one")
        return path_text(value) if isinstance(value, str) else value

    @field_validator("output")
    @classmethod
    def _home(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("optimizer", mode="before")
    @classmethod
    def _default_optimizer(cls, value: Any) -> Any:
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @field_validator("schedule", mode="before")
    @classmethod
    def _default_schedule(cls, value: Any) -> Any:
        return {"name": "constant", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _streaming_has_an_end(self) -> RunConfig:
        if self.data.streaming and self.train.steps is None:
            raise ValueError("data.streaming needs train.steps, since the number of rows is not known")
        return self

    @model_validator(mode="after")
    def _stopping_early_has_rows_to_measure_on(self) -> RunConfig:
        held_out = self.data.validation is not None or self.data.validation_fraction is not None
        if self.evaluation.early_stopping is not None and not held_out:
            raise ValueError("evaluation.early_stopping needs rows to measure on; name them in data.validation")
        return self

    @model_validator(mode="after")
    def _quantised_weights_are_not_saved_or_compiled(self) -> RunConfig:
        quantized = isinstance(self.adapter, LoraConfig) and self.adapter.quantize
        if self.checkpoint.trainable_only is False and quantized:
            raise ValueError(
                "checkpoint.trainable_only: false would write a base that adapter.quantize has rounded; leave it out"
            )
        if quantized and self.train.compile:
            raise ValueError("train.compile cannot take a base that adapter.quantize keeps in four bits; leave it out")
        return self

    @model_validator(mode="after")
    def _in_backward_sees_one_gradient_at_a_time(self) -> RunConfig:
        if self.optimizer.in_backward and self.train.max_gradient_norm is not None:
            raise ValueError("optimizer.in_backward cannot clip to a global norm; set train.max_gradient_norm: null")
        if self.optimizer.in_backward and self.train.on_non_finite == "skip":
            raise ValueError("optimizer.in_backward cannot leave a step out; set train.on_non_finite: stop")
        return self

    @model_validator(mode="after")
    def _rows_are_what_the_method_needs(self) -> RunConfig:
        self.data = self.data.model_copy(deep=True)  # what it is made of may be another config's too
        set_kind(self.data, self.method.rows)
        if self.data.streaming and self.method.name == "kto":
            raise ValueError("kto compares with earlier rows, which a stream has let go; set data.streaming: false")
        compares = self.method.name == "grpo" or getattr(self.method, "reference", None) == "base"
        if self.moe.bias_update_rate is not None and compares:
            raise ValueError(f"moe.bias_update_rate moves what {self.method.name} samples from or compares with")
        if self.data.streaming and getattr(self.method, "reference", "base") != "base":
            raise ValueError("data.streaming needs method.reference: base, since rows that stream have no numbers")
        self.method.check(self)
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
            if getattr(self.parallel, name) != 1 and (why := self.method.refused_degree(name)):
                raise ValueError(why)
        return self
