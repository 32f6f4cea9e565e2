"""Where jobs run, and what may be said of one job besides its runtime, data, model and trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

# --- where jobs run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalBackendConfig:
    """On this machine.

    Attributes:
        home: the store of jobs and their directories; LUTHIER_HOME, else the user's data directory, when left out.
        max_running_jobs: how many run at a time; the others wait.
    """

    home: Path | str | None = None
    max_running_jobs: int = 1


@dataclass(frozen=True)
class KubernetesBackendConfig:
    """On a cluster with Kubeflow Trainer.

    Attributes:
        namespace: the kubeconfig's own when left out.
        config_file: a kubeconfig.
        context: of the kubeconfig.
        client_configuration: a `kubernetes.client.Configuration`, instead of a kubeconfig.
    """

    namespace: str | None = None
    config_file: str | None = None
    context: str | None = None
    client_configuration: Any = None


@dataclass(frozen=True)
class SlurmBackendConfig:
    """Through sbatch.

    Attributes:
        home: a directory that every node sees; LUTHIER_HOME, else the user's data directory, when left out.
        partition, account, qos, time_limit: as sbatch takes them; the cluster's own when left out.
        sbatch_options: further options of sbatch ("--exclusive").
    """

    home: Path | str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    sbatch_options: tuple[str, ...] = ()


BackendConfig = LocalBackendConfig | KubernetesBackendConfig | SlurmBackendConfig


# --- options of one job ---------------------------------------------------------------------------------------------


@dataclass
class Name:
    """The job's name, instead of a random one."""

    name: str


@dataclass
class Labels:
    labels: dict[str, str]


@dataclass
class Annotations:
    annotations: dict[str, str]


@dataclass
class ActiveDeadlineSeconds:
    """A job that runs longer fails."""

    seconds: int


@dataclass
class TrainerCommand:
    """What a `CustomTrainerContainer` runs instead of its image's entry point."""

    command: list[str]


@dataclass
class TrainerArgs:
    """Arguments of that, or of the image's own entry point."""

    args: list[str]


@dataclass
class InheritEnvironment:
    """Nodes on this machine see the environment of whoever submits the job."""


@dataclass
class ContainerPatch:
    name: str
    env: list[dict[str, Any]] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None


@dataclass
class PodSpecPatch:
    service_account_name: str | None = None
    volumes: list[dict[str, Any]] | None = None
    init_containers: list[ContainerPatch] | None = None
    containers: list[ContainerPatch] | None = None
    image_pull_secrets: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None
    node_selector: dict[str, str] | None = None
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None


@dataclass
class PodTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: PodSpecPatch | None = None


@dataclass
class JobSpecPatch:
    template: PodTemplatePatch | None = None


@dataclass
class JobTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: JobSpecPatch | None = None


@dataclass
class ReplicatedJobPatch:
    name: str
    template: JobTemplatePatch | None = None


@dataclass
class JobSetSpecPatch:
    replicated_jobs: list[ReplicatedJobPatch] | None = None


@dataclass
class JobSetTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: JobSetSpecPatch | None = None


@dataclass
class TrainingRuntimeSpecPatch:
    template: JobSetTemplatePatch | None = None


@dataclass
class RuntimePatch:
    """A change to what the runtime makes of the job's pods (Kubernetes only)."""

    training_runtime_spec: TrainingRuntimeSpecPatch | None = None
    manager: str = field(default="trainer.kubeflow.org/kubeflow-sdk", init=False, repr=False)


Option = (
    Name
    | Labels
    | Annotations
    | ActiveDeadlineSeconds
    | TrainerCommand
    | TrainerArgs
    | InheritEnvironment
    | RuntimePatch
)


def patch_object(patch: Any) -> Any:
    """A patch as its CRD has it: names in camel case, without what was not said."""
    if isinstance(patch, list):
        return [patch_object(item) for item in patch]
    if not is_dataclass(patch):
        return patch
    found = {}
    for known in fields(patch):
        if (value := getattr(patch, known.name)) is not None:
            first, *rest = known.name.split("_")
            found[first + "".join(map(str.capitalize, rest))] = patch_object(value)
    return found
