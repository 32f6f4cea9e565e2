"""From a runtime of the cluster, ours or anybody's, to the SDK's `Runtime`."""

from __future__ import annotations

import re

from luthier.jobs.backends.kubernetes_names import (
    FRAMEWORK,
    NODE,
    TRAINER,
    Object,
    ancestor,
    containers,
    environment,
    is_ours,
    labels,
    replicated_jobs,
)
from luthier.jobs.spec import MODEL_STEP
from luthier.jobs.types import UNKNOWN, Framework, Runtime, RuntimeKind, RuntimeTrainer, TrainerType

_BUILTIN = (Framework.LUTHIER, Framework.TORCHTUNE)
"""Frameworks whose runtimes train by parameters alone."""
_PROGRAM = {"torch": "torchrun", "mpi": "mpirun", "flux": "flux"}
"""What starts the processes of a policy."""


def runtime_of(found: Object) -> Runtime:
    """The runtime that an object is. What it lacks is left unknown: it is listed under its name all the same.

    Args:
        found: a TrainingRuntime or ClusterTrainingRuntime.
    """
    container = trainer_container(found)
    return Runtime(
        name=found["metadata"]["name"],
        trainer=_trainer(found, container) if container is not None else None,
        kind=RuntimeKind(found.get("kind") or RuntimeKind.CLUSTER_TRAINING_RUNTIME),
        pretrained_model=_pretrained_model(found),
    )


def trainer_container(runtime: Object) -> Object | None:
    """The container that trains: `node` in the replicated job that takes the TrainJob's trainer."""
    for job in replicated_jobs(runtime).values():
        if ancestor(job) == TRAINER and (container := containers(job).get(NODE)) is not None:
            return container
    return None


def number_of_nodes(runtime: Object) -> int:
    """Machines that its jobs take by default."""
    return int(_policy(runtime).get("numNodes") or 1)


def policy_of(runtime: Object) -> str | None:
    """What makes its nodes meet: torch, mpi, jax, xgboost or flux; None for nothing."""
    return next((name for name in ("torch", "mpi", "jax", "xgboost", "flux") if name in _policy(runtime)), None)


def device_of(container: Object) -> tuple[str, str] | None:
    """Device and count that a container asks for, as Kubeflow's SDK tells them; None where it asks for none."""
    limits = (container.get("resources") or {}).get("limits") or {}
    for name, count in limits.items():
        maker, _, kind = name.rpartition("/")
        if maker:
            return re.sub(r"^Ascend\d+$", "npu", kind), str(count)
    return ("cpu", str(limits["cpu"])) if "cpu" in limits else None


def _policy(runtime: Object) -> Object:
    found: Object = (runtime.get("spec") or {}).get("mlPolicy") or {}
    return found


def _trainer(found: Object, container: Object) -> RuntimeTrainer:
    policy = policy_of(found)
    framework = labels(found).get(FRAMEWORK) or policy or UNKNOWN
    if framework == Framework.TORCHTUNE and is_ours(found):
        framework = Framework.LUTHIER  # it is offered to Kubeflow's own SDK as torchtune, and takes our configs
    device, count = device_of(container) or (UNKNOWN, UNKNOWN)
    if (processes := (_policy(found).get("mpi") or {}).get("numProcPerNode")) is not None:
        count = str(processes)
    command = tuple(container.get("command") or ())
    if not command or framework not in _BUILTIN:
        command = (_PROGRAM.get(policy or "", "python"),)
    return RuntimeTrainer(
        trainer_type=TrainerType.BUILTIN_TRAINER if framework in _BUILTIN else TrainerType.CUSTOM_TRAINER,
        framework=next((known for known in Framework if known == framework), framework),
        image=container.get("image") or "",
        num_nodes=number_of_nodes(found),
        device=device,
        device_count=int(count) if count.isdigit() else count,
        command=command,
    )


def _pretrained_model(found: Object) -> str | None:
    """What its model initializer fetches: a Hub id, or a URI elsewhere."""
    job = replicated_jobs(found).get(MODEL_STEP)
    container = containers(job).get(MODEL_STEP) if job is not None else None
    uri = environment(container).get("STORAGE_URI") if container is not None else None
    return uri.removeprefix("hf://") if uri else None
