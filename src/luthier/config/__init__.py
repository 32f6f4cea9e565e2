"""What a run is: the YAML, its defaults, its errors. Imports no torch; and pydantic only with the first name asked for,
so that `presets` can be read without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luthier.config.adapters import AdapterConfig, AdaptionPromptConfig, PrefixConfig, PromptConfig
    from luthier.config.load import check_config, dump_config, load_config
    from luthier.config.run import RunConfig
    from luthier.config.schedules import ScheduleConfig
    from luthier.config.sections import (
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        GenerationConfig,
        LoraConfig,
        MoeConfig,
        OptimizerConfig,
        ParallelConfig,
        ReportConfig,
        SourceConfig,
        TrainConfig,
    )

__all__ = [
    "AdapterConfig",
    "AdaptionPromptConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LoraConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrefixConfig",
    "PromptConfig",
    "ReportConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainConfig",
    "check_config",
    "dump_config",
    "load_config",
]

_HOMES = {
    "AdapterConfig": "adapters",
    "AdaptionPromptConfig": "adapters",
    "PrefixConfig": "adapters",
    "PromptConfig": "adapters",
    "RunConfig": "run",
    "ScheduleConfig": "schedules",
    "check_config": "load",
    "dump_config": "load",
    "load_config": "load",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'sections')}"), name)
