"""From a TrainJob, its runtime and its pods to the SDK's `TrainJob`: statuses, steps, progress. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from luthier.jobs.backends.kubernetes_names import (
    EXPORTER,
    INDEX,
    JOBSET,
    LAUNCHER,
    NODE,
    REPLICATED_JOB,
    Object,
    containers,
    environment,
    labels,
    replicated_jobs,
)
from luthier.jobs.backends.kubernetes_objects import exports
from luthier.jobs.backends.kubernetes_runtimes import device_of, number_of_nodes, policy_of, runtime_of
from luthier.jobs.spec import DATASET_STEP, MODEL_STEP, node_step
from luthier.jobs.types import (
    COMPLETE,
    CREATED,
    FAILED,
    RUNNING,
    SUSPENDED,
    UNKNOWN,
    Runtime,
    Step,
    TrainerStatus,
    TrainJob,
)

FINAL = (COMPLETE, FAILED)

_PHASES = {"Pending": CREATED, "Running": RUNNING, "Succeeded": COMPLETE, "Failed": FAILED}
_CONTAINERS = {DATASET_STEP: DATASET_STEP, MODEL_STEP: MODEL_STEP, EXPORTER: EXPORTER}
"""Names of replicated jobs -> the container that does its work; that of all others is `node`."""


def train_job_of(found: Object, runtime: Object | None, pods: Sequence[Object]) -> TrainJob:
    """A TrainJob as it is.

    Args:
        found: the TrainJob's object.
        runtime: the object of its runtime; None where that is gone.
        pods: those of the job; older ones that others have replaced may be among them.
    """
    metadata, spec = found["metadata"], found["spec"]
    newest = pods_of_steps(pods, runtime)
    status = status_of(found, list(newest.values()))
    nodes = _number_of_nodes(found, runtime)
    steps = [_step(name, newest.get(name), found, status) for name in step_names(found, runtime, newest)]
    return TrainJob(
        name=metadata["name"],
        runtime=runtime_of(runtime) if runtime is not None else Runtime(spec["runtimeRef"]["name"]),
        steps=steps,
        num_nodes=nodes,
        creation_timestamp=when(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
        status=status,
        trainer_status=_trainer_status((found.get("status") or {}).get("trainerStatus")),
        message=_message(found, status, steps, newest),
    )


def status_of(found: Object, pods: Sequence[Object]) -> str:
    """What a TrainJob is in: what its conditions say, else whether a pod of it has begun."""
    said = {condition["type"]: condition["status"] == "True" for condition in conditions(found)}
    for status in (FAILED, COMPLETE, SUSPENDED):
        if said.get(status):
            return status
    begun = any((pod.get("status") or {}).get("phase") not in (None, "Pending", "Unknown") for pod in pods)
    if begun:
        return RUNNING
    return SUSPENDED if found["spec"].get("suspend") else CREATED


def conditions(found: Object) -> list[Object]:
    """Conditions of a TrainJob."""
    listed: list[Object] = (found.get("status") or {}).get("conditions") or []
    return listed


def step_names(found: Object, runtime: Object | None, pods: Iterable[str]) -> list[str]:
    """Names of a job's steps, whether their pods are there yet or not, in the order in which they begin. An initializer
    that fetches nothing and an exporter that is told no place are none, though they have pods.

    Args:
        found: the TrainJob's object.
        runtime: the object of its runtime; None where that is gone.
        pods: steps that have pods.
    """
    asked = found["spec"].get("initializer") or {}
    jobs = replicated_jobs(runtime) if runtime is not None else {}
    names = []
    for field, step in (("dataset", DATASET_STEP), ("model", MODEL_STEP)):
        uri = (asked.get(field) or {}).get("storageUri")
        by_itself = _says_uri(jobs.get(step), step) if runtime is not None else step in pods
        if uri or (uri is None and by_itself):
            names.append(step)
    names += [node_step(number) for number in range(_number_of_nodes(found, runtime))]
    names += [EXPORTER] if exports(found) else []
    return list(dict.fromkeys([*names, *(step for step in pods if step not in _CONTAINERS)]))


def _says_uri(job: Object | None, step: str) -> bool:
    """Whether an initializer of a runtime has something to fetch when its job says nothing. One that is not ours may
    know where from by other means."""
    if job is None:
        return False
    container = containers(job).get(step) or {}
    return bool(environment(container).get("STORAGE_URI")) or not container.get("command")


def pods_of_steps(pods: Sequence[Object], runtime: Object | None) -> dict[str, Object]:
    """Step -> its newest pod; a pod that failed and was tried again has another."""
    newest: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        if REPLICATED_JOB in labels(pod):
            newest[step_of(pod, runtime)] = pod
    return newest


def step_of(pod: Object, runtime: Object | None) -> str:
    """The step that a pod is. With mpirun, the launcher is the first node."""
    job, index = labels(pod)[REPLICATED_JOB], int(labels(pod).get(INDEX) or 0)
    if job in _CONTAINERS:
        return job
    launched = (
        job == NODE and runtime is not None and policy_of(runtime) == "mpi" and LAUNCHER in replicated_jobs(runtime)
    )
    return node_step(index + 1 if launched else index)


def container_of(pod: Object) -> str:
    """Name of the container that does a pod's work."""
    return _CONTAINERS.get(labels(pod)[REPLICATED_JOB], NODE)


def by_job(pods: Sequence[Object]) -> Mapping[str, list[Object]]:
    """Name of a job -> its pods."""
    sorted_out: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        if (name := labels(pod).get(JOBSET)) is not None:
            sorted_out[name].append(pod)
    return sorted_out


def container_status(pod: Object) -> Object:
    """Status of the container that does a pod's work; empty before there is one."""
    listed = (pod.get("status") or {}).get("containerStatuses") or []
    return next((status for status in listed if status.get("name") == container_of(pod)), {})


def has_begun(pod: Object) -> bool:
    """Whether a pod's container has run, so that there is a log."""
    state = container_status(pod).get("state")
    if state:
        return "running" in state or "terminated" in state
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def ran(pod: Object) -> tuple[str | None, str | None, int | None]:
    """When a pod's container began and ended, and its exit code, as the cluster writes them."""
    state = container_status(pod).get("state") or {}
    ended = state.get("terminated") or {}
    began = (ended or state.get("running") or {}).get("startedAt")
    return began, ended.get("finishedAt"), ended.get("exitCode")


def why_waiting(pod: Object) -> str:
    """What a pod that has not begun waits for, as the cluster says it; "" where it does not."""
    waiting = (container_status(pod).get("state") or {}).get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return ": ".join(part for part in (waiting["reason"], waiting.get("message")) if part)
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return condition.get("message") or condition.get("reason") or ""
    return waiting.get("reason") or ""


def when(text: str | None) -> datetime | None:
    """A time as the cluster writes it.

    >>> when("2026-01-02T03:04:05Z").isoformat()
    '2026-01-02T03:04:05+00:00'
    """
    if not text:
        return None
    found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


# --- parts of a TrainJob ----------------------------------------------------------------------------------------------


def _number_of_nodes(found: Object, runtime: Object | None) -> int:
    asked = (found["spec"].get("trainer") or {}).get("numNodes")
    if asked is not None:
        return int(asked)
    return number_of_nodes(runtime) if runtime is not None else 1


def _step(name: str, pod: Object | None, found: Object, job_status: str) -> Step:
    if pod is None:
        return Step(name, _status_without_pod(name, found, job_status), "")
    phase = (pod.get("status") or {}).get("phase")
    began, ended, code = ran(pod)
    container: Object = next((it for it in pod["spec"]["containers"] if it["name"] == container_of(pod)), {})
    device, count = device_of(container) or (UNKNOWN, UNKNOWN)
    return Step(
        name=name,
        status=_PHASES.get(phase or "", UNKNOWN),
        pod_name=pod["metadata"]["name"],
        device=device,
        device_count=count,
        started=when(began),
        ended=when(ended),
        exit_code=code,
    )


def _status_without_pod(name: str, found: Object, job_status: str) -> str:
    """Of a step whose pod has not come yet, or has been cleared away."""
    job = name if name in _CONTAINERS else NODE
    told: dict[str, Any] = next(
        (it for it in (found.get("status") or {}).get("jobsStatus") or [] if it["name"] == job), {}
    )
    if told.get("succeeded") or job_status == COMPLETE:
        return COMPLETE
    if told.get("failed"):
        return FAILED
    return SUSPENDED if job_status == SUSPENDED else CREATED


def _trainer_status(said: Object | None) -> TrainerStatus | None:
    if not said:
        return None
    metrics = {}
    for metric in said.get("metrics") or []:
        try:
            metrics[metric["name"]] = float(metric["value"])
        except ValueError:
            continue  # anybody may post words there
    return TrainerStatus(
        progress_percentage=said.get("progressPercentage"),
        estimated_remaining_seconds=said.get("estimatedRemainingSeconds"),
        metrics=metrics,
        last_updated_time=when(said.get("lastUpdatedTime")),
    )


def _message(found: Object, status: str, steps: Sequence[Step], pods: Mapping[str, Object]) -> str:
    if status == SUSPENDED:
        return "resume_job() lets it go on"
    if status == FAILED:
        return _why_failed(found, steps)
    if status == CREATED:
        reasons = [f"{name}: {why}" for name, pod in pods.items() if (why := why_waiting(pod))]
        return f"waits for the cluster: {reasons[0]}" if reasons else ""
    return ""


def _why_failed(found: Object, steps: Sequence[Step]) -> str:
    condition: Object = next((it for it in conditions(found) if it["type"] == FAILED), {})
    if condition.get("reason") == "DeadlineExceeded" and (limit := found["spec"].get("activeDeadlineSeconds")):
        return f"ran longer than its active_deadline_seconds of {limit}"
    if failed := first_failed(steps):
        return f"{failed.name} left with exit code {failed.exit_code}"
    return condition.get("message") or condition.get("reason") or ""


def first_failed(steps: Sequence[Step]) -> Step | None:
    """The step whose failure ended a job: the one that failed first."""
    failed = [step for step in steps if step.exit_code]
    return min(failed, key=lambda step: step.ended or datetime.max.replace(tzinfo=UTC), default=None)
