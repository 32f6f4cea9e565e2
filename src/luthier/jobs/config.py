"""`LuthierConfig`: every field of a Luthier YAML, typed, and what a job needs to know besides."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, ValidationError, model_validator

from luthier.config import DataConfig, RunConfig
from luthier.config.faults import Fault, raise_all
from luthier.config.load import faults_of
from luthier.errors import ConfigError

OF_THE_JOB = ("num_nodes", "num_procs_per_node", "resources_per_node")


def at_field(prefix: str, fault: Fault) -> ConfigError:
    """A fault of plain data, at its field's path."""
    return ConfigError(fault.what, where=".".join((prefix, *fault.path)), remedy=fault.remedy)


class LuthierConfig(RunConfig):
    """A run as its YAML has it. What is left out comes from the runtime; sections are models or plain mappings.

    Model and data may be left out where the runtime or an initializer brings them; relative paths start at the job's
    workspace, where there is no such file here. The run directory is the workspace's `output`.

    Raises:
        ConfigError: what the YAML's reader would refuse, in the same words.
    """

    model: str | None = None  # type: ignore[assignment]
    data: DataConfig = Field(default_factory=DataConfig)
    num_nodes: PositiveInt | None = None
    """Machines."""
    num_procs_per_node: PositiveInt | None = None
    """Processes of each; one for each GPU that it asks for, else as many as its runtime says."""
    resources_per_node: dict[str, Any] | None = None
    """By Kubernetes' names: {"gpu": 4, "cpu": 8, "memory": "64Gi"}."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(cls, data: Any, handler: ModelWrapValidatorHandler[LuthierConfig]) -> LuthierConfig:
        try:
            return handler(data)
        except ValidationError as error:
            raise_all([at_field("trainer.config", fault) for fault in faults_of(error, cls)])
            raise

    def given(self) -> dict[str, Any]:
        """What was said, as plain data; no default that nobody named."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_JOB))
