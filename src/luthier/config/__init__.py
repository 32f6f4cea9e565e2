"""What a run is: the YAML, its defaults, its errors. Imports no torch."""

from luthier.config.load import dump_config, load_config
from luthier.config.run import RunConfig
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
    ScheduleConfig,
    SourceConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LoraConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReportConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
]
