"""Fine-tuning as jobs, in the shape of Kubeflow's SDK: on this machine, on Kubernetes, through Slurm. Imports no torch.

from luthier.jobs import BuiltinTrainer, LoraConfig, TorchTuneConfig, TrainerClient

client = TrainerClient()
name = client.train(
    runtime="luthier-qwen2.5-0.5b",
    trainer=BuiltinTrainer(config=TorchTuneConfig(dtype="bf16", peft_config=LoraConfig(lora_rank=16))),
)
client.wait_for_job_status(name)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luthier.jobs.client import (
        JobFailedError,
        JobTimeoutError,
        TrainerClient,
    )
    from luthier.jobs.config import (
        LuthierConfig,
    )
    from luthier.jobs.datasets import (
        register_dataset,
    )
    from luthier.jobs.engines import (
        register_engine,
    )
    from luthier.jobs.options import (
        ActiveDeadlineSeconds,
        Annotations,
        ContainerPatch,
        InheritEnvironment,
        JobSetSpecPatch,
        JobSetTemplatePatch,
        JobSpecPatch,
        JobTemplatePatch,
        KubernetesBackendConfig,
        Labels,
        LocalBackendConfig,
        Name,
        PodSpecPatch,
        PodTemplatePatch,
        ReplicatedJobPatch,
        RuntimePatch,
        SlurmBackendConfig,
        TrainerArgs,
        TrainerCommand,
        TrainingRuntimeSpecPatch,
    )
    from luthier.jobs.sharding import (
        FsdpConfig,
        ShardingStrategy,
        StateDictType,
        ZeroConfig,
    )
    from luthier.jobs.spec import (
        JobSpec,
    )
    from luthier.jobs.trainers import (
        AdapterConfig,
        BuiltinTrainer,
        CustomDataset,
        CustomTrainer,
        CustomTrainerContainer,
        DataFormat,
        DataType,
        LoraConfig,
        Loss,
        PrefixConfig,
        TorchTuneChatDataset,
        TorchTuneConfig,
        TorchTuneInstructDataset,
        TorchTuneMultimodalDataset,
        TrainJobTemplate,
    )
    from luthier.jobs.types import (
        DATASET_PATH,
        MODEL_PATH,
        DatasetInitializer,
        Event,
        Framework,
        HuggingFaceDatasetInitializer,
        HuggingFaceModelInitializer,
        Initializer,
        ModelExporter,
        ModelInitializer,
        Runtime,
        RuntimeKind,
        RuntimeTrainer,
        S3DatasetInitializer,
        S3ModelInitializer,
        Step,
        Trainer,
        TrainerStatus,
        TrainerType,
        TrainJob,
    )

__all__ = [
    "DATASET_PATH",
    "MODEL_PATH",
    "ActiveDeadlineSeconds",
    "AdapterConfig",
    "Annotations",
    "BuiltinTrainer",
    "ContainerPatch",
    "CustomDataset",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataFormat",
    "DataType",
    "DatasetInitializer",
    "Event",
    "Framework",
    "FsdpConfig",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "InheritEnvironment",
    "Initializer",
    "JobFailedError",
    "JobSetSpecPatch",
    "JobSetTemplatePatch",
    "JobSpec",
    "JobSpecPatch",
    "JobTemplatePatch",
    "JobTimeoutError",
    "KubernetesBackendConfig",
    "Labels",
    "LocalBackendConfig",
    "LoraConfig",
    "Loss",
    "LuthierConfig",
    "ModelExporter",
    "ModelInitializer",
    "Name",
    "PodSpecPatch",
    "PodTemplatePatch",
    "PrefixConfig",
    "ReplicatedJobPatch",
    "Runtime",
    "RuntimeKind",
    "RuntimePatch",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "ShardingStrategy",
    "SlurmBackendConfig",
    "StateDictType",
    "Step",
    "TorchTuneChatDataset",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TorchTuneMultimodalDataset",
    "TrainJob",
    "TrainJobTemplate",
    "Trainer",
    "TrainerArgs",
    "TrainerClient",
    "TrainerCommand",
    "TrainerStatus",
    "TrainerType",
    "TrainingRuntimeSpecPatch",
    "ZeroConfig",
    "register_dataset",
    "register_engine",
]

_HOMES = {
    "JobFailedError": "client",
    "JobTimeoutError": "client",
    "LuthierConfig": "config",
    "TrainerClient": "client",
    "register_dataset": "datasets",
    "register_engine": "engines",
}
_LIGHT = ("types", "trainers", "sharding", "options", "spec")
"""Modules of all other names; each is imported when something of it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in (_HOMES[name],) if name in _HOMES else _LIGHT:
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(f"{name} has no home")


def __dir__() -> list[str]:
    return sorted(__all__)
