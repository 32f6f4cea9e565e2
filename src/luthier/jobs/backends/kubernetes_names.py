"""Names that Kubeflow Trainer and JobSet give to things, and ours beside them."""

from __future__ import annotations

from typing import Any

GROUP, VERSION = "trainer.kubeflow.org", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
TRAIN_JOBS, RUNTIMES, CLUSTER_RUNTIMES = "trainjobs", "trainingruntimes", "clustertrainingruntimes"

FRAMEWORK = "trainer.kubeflow.org/framework"
"""Label of a runtime."""
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of a replicated job: which part of a TrainJob it takes."""
TRAINER = "trainer"

JOBSET = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "batch.kubernetes.io/job-completion-index"
"""Labels of a pod. A JobSet has its TrainJob's name; the index is that of the pod in its replicated job."""

NODE, LAUNCHER, EXPORTER = "node", "launcher", "exporter"
"""Replicated jobs, and the containers in them, besides those of the initializers."""

OURS = "jobs.luthier/image"
"""Label of a runtime whose containers run Luthier's image: its value is "true"."""
RECIPE, SECRETS, SUBMISSION = "jobs.luthier/recipe", "jobs.luthier/secrets", "jobs.luthier/submission"
"""Annotations of a TrainJob: what the selection chose; names of its Secrets, with commas between them; which call of
`submit` has made it."""
EXPORT_MANAGER = "jobs.luthier/exporter"
"""Who owns the patch of a TrainJob that tells the exporter where to."""

WORKSPACE = "/workspace"
GPU = "nvidia.com/gpu"

Object = dict[str, Any]
"""An object of the cluster, as its JSON has it."""


def replicated_jobs(runtime: Object) -> dict[str, Object]:
    """Name -> replicated job of a runtime."""
    template = (runtime.get("spec") or {}).get("template") or {}
    return {job["name"]: job for job in (template.get("spec") or {}).get("replicatedJobs") or [] if "name" in job}


def containers(replicated_job: Object) -> dict[str, Object]:
    """Name -> container of a replicated job."""
    job = (replicated_job.get("template") or {}).get("spec") or {}
    pod = (job.get("template") or {}).get("spec") or {}
    return {container["name"]: container for container in pod.get("containers") or [] if "name" in container}


def ancestor(replicated_job: Object) -> str | None:
    """Which part of a TrainJob a replicated job takes."""
    metadata = (replicated_job.get("template") or {}).get("metadata") or {}
    step: str | None = (metadata.get("labels") or {}).get(ANCESTOR)
    return step


def labels(thing: Object) -> dict[str, str]:
    """Labels of an object."""
    found: dict[str, str] = (thing.get("metadata") or {}).get("labels") or {}
    return found


def is_ours(runtime: Object) -> bool:
    """Whether a runtime's containers run Luthier's image."""
    return labels(runtime).get(OURS) == "true"


def environment(container: Object) -> dict[str, str]:
    """Variables of a container whose values it says itself."""
    return {entry["name"]: entry["value"] for entry in container.get("env") or [] if "value" in entry}
