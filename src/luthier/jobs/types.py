"""What a user of the SDK writes and reads, by Kubeflow's names and fields (SDK 0.5.0), KEP-2401's beside them.

Plain data: nothing is checked when one of these is made, so that every mistake is found in one place (`validate.py`),
is said with its field's full path, and reads the same on every backend. Where an enum is meant its value or its name
will do as text (`dtype="bf16"`). `None` means "not given"; zero, False and empty lists are values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, TypeVar

from luthier.config.suggest import nearest
from luthier.errors import ConfigError

UNKNOWN = "Unknown"
"""Where Kubeflow's types say nothing better."""

CREATED, RUNNING, COMPLETE, FAILED, SUSPENDED = "Created", "Running", "Complete", "Failed", "Suspended"
STATUSES = (CREATED, RUNNING, COMPLETE, FAILED, SUSPENDED)
"""What a job can be in."""

DATASET_PATH, MODEL_PATH = "/workspace/dataset", "/workspace/model"
"""Where initializers leave their files in a pod; elsewhere the same directories below a job's workspace."""

WEIGHTS_BESIDE = ["*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth"]
"""Forms of weights that are not fetched: safetensors are."""


Given = TypeVar("Given")


def fields_named(cls: type[Given]) -> type[Given]:
    """Say which field was meant where one is given that there is not."""
    make: Any = cls.__init__
    known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: Given, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                meant = nearest(name, known)
                remedy = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
                raise ConfigError("is not a known field", where=f"{cls.__name__}.{name}", remedy=remedy)
        make(self, *args, **given)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def also_named(**names: str) -> Callable[[type[Given]], type[Given]]:
    """Let fields be given by other names, too."""

    def name(cls: type[Given]) -> type[Given]:
        make: Any = cls.__init__

        @functools.wraps(make)
        def init(self: Given, *args: Any, **given: Any) -> None:
            make(self, *args, **{names.get(name, name): value for name, value in given.items()})

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return name


class TrainerType(StrEnum):
    CUSTOM_TRAINER = "CustomTrainer"
    BUILTIN_TRAINER = "BuiltinTrainer"


class Framework(StrEnum):
    """What a runtime runs. Ours is `luthier`; the others are those of Kubeflow's own runtimes."""

    LUTHIER = "luthier"
    TORCH = "torch"
    TORCHTUNE = "torchtune"
    DEEPSPEED = "deepspeed"
    MLX = "mlx"
    JAX = "jax"
    XGBOOST = "xgboost"


class RuntimeKind(StrEnum):
    CLUSTER_TRAINING_RUNTIME = "ClusterTrainingRuntime"
    TRAINING_RUNTIME = "TrainingRuntime"


# --- runtimes -------------------------------------------------------------------------------------------------------


@also_named(entrypoint="command", accelerator="device", accelerator_count="device_count")
@fields_named
@dataclass
class RuntimeTrainer:
    """The trainer of a runtime. KEP-2401 calls it Trainer, and three of its fields entrypoint, accelerator and
    accelerator_count.

    Attributes:
        image: container image; empty where a backend runs no containers.
        num_nodes: machines that a job of this runtime takes by default.
        device: "cpu", "gpu" or a resource's name.
        device_count: of each node.
        command: what a node runs.
    """

    trainer_type: TrainerType | str
    framework: Framework | str
    image: str = ""
    num_nodes: int = 1
    device: str = UNKNOWN
    device_count: str | int | float = UNKNOWN
    command: tuple[str, ...] = ()

    def set_command(self, command: Sequence[str]) -> None:
        self.command = tuple(command)

    @property
    def entrypoint(self) -> list[str]:
        return list(self.command)

    @property
    def accelerator(self) -> str:
        return self.device

    @property
    def accelerator_count(self) -> str | int | float:
        return self.device_count


Trainer = RuntimeTrainer


@fields_named
@dataclass
class Runtime:
    """A blueprint of jobs. To name one in `train`, its name alone suffices.

    Attributes:
        pretrained_model: the model that its jobs start from ("Qwen/Qwen2.5-0.5B-Instruct").
    """

    name: str
    trainer: RuntimeTrainer | None = None
    kind: RuntimeKind | str = RuntimeKind.CLUSTER_TRAINING_RUNTIME
    pretrained_model: str | None = None

    @property
    def trainer_type(self) -> TrainerType | str | None:
        return self.trainer.trainer_type if self.trainer is not None else None


# --- jobs -----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step of a job.

    Attributes:
        name: "dataset-initializer", "model-initializer", "node-N" or "exporter".
        status: one of `STATUSES`.
        pod_name: what runs it: a pod, a Slurm step, or job and step on this machine.
        started, ended: None where that has not come yet.
        exit_code: of its process; 128 and the signal's number where one ended it.
    """

    name: str
    status: str | None
    pod_name: str
    device: str = UNKNOWN
    device_count: str = UNKNOWN
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None


@dataclass
class TrainerStatus:
    """What the nodes say of themselves, as in `status.trainerStatus` of a TrainJob.

    Attributes:
        progress_percentage: 0 to 100.
        estimated_remaining_seconds: until the nodes are done.
        metrics: the newest of each name.
        last_updated_time: of the last word.
    """

    progress_percentage: int | None = None
    estimated_remaining_seconds: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    last_updated_time: datetime | None = None


@dataclass
class TrainJob:
    """A job as it is at one moment.

    Attributes:
        trainer_status: progress; None before the first word of a node.
        message: why it is where it is ("node-0 left with exit code 1: ..."), "" where that goes without saying.
    """

    name: str
    runtime: Runtime
    steps: list[Step]
    num_nodes: int
    creation_timestamp: datetime
    status: str = UNKNOWN
    trainer_status: TrainerStatus | None = None
    message: str = ""


@dataclass
class Event:
    """Something that happened to a job.

    Attributes:
        involved_object_kind: "TrainJob", or what runs a step ("Pod", "Step").
        reason: one word ("Started").
    """

    involved_object_kind: str
    involved_object_name: str
    message: str
    reason: str
    event_time: datetime


# --- initializers and exporters -------------------------------------------------------------------------------------


@fields_named
@dataclass
class DatasetInitializer:
    """Fetches a data set into `dataset/`: hf://, s3://, gs://, https:// or file://."""

    storage_uri: str
    ignore_patterns: list[str] | None = None
    access_token: str | None = field(default=None, repr=False)


@fields_named
@dataclass
class HuggingFaceDatasetInitializer(DatasetInitializer):
    """A data set of the Hub: "hf://owner/name", or "owner/name"; what follows the name is a path in it."""


@dataclass
class _S3Initializer:
    storage_uri: str
    ignore_patterns: list[str] | None = None
    endpoint: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    role_arn: str | None = None


@fields_named
@dataclass
class S3DatasetInitializer(_S3Initializer):
    """A data set in S3 or what speaks like it."""


@fields_named
@dataclass
class ModelInitializer:
    """Fetches a model into `model/`: hf://, s3://, gs://, https:// or file://."""

    storage_uri: str
    ignore_patterns: list[str] | None = field(default_factory=lambda: list(WEIGHTS_BESIDE))
    access_token: str | None = field(default=None, repr=False)


@fields_named
@dataclass
class HuggingFaceModelInitializer(ModelInitializer):
    """A model of the Hub: "hf://owner/name", or "owner/name"."""


@fields_named
@dataclass
class S3ModelInitializer(_S3Initializer):
    """A model in S3 or what speaks like it."""

    ignore_patterns: list[str] | None = field(default_factory=lambda: list(WEIGHTS_BESIDE))


@fields_named
@dataclass
class Initializer:
    """What is fetched before the nodes start; where one is left out, the runtime's own is."""

    dataset: DatasetInitializer | S3DatasetInitializer | None = None
    model: ModelInitializer | S3ModelInitializer | None = None


ExportForm = Literal["merged", "adapter"]


@fields_named
@dataclass
class ModelExporter:
    """Takes the trained model elsewhere, as a last step: hf:// (pushed to the Hub), s3://, gs:// or file://.

    Attributes:
        form: "merged" for a whole model, "adapter" for PEFT files alone.
        access_token: of the Hub.
        endpoint, access_key_id, secret_access_key, region, role_arn: of S3.
    """

    storage_uri: str
    form: ExportForm = "merged"
    access_token: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    role_arn: str | None = None
