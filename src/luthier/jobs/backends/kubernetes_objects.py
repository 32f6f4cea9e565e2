"""What a job is on a cluster: a TrainJob, and a Secret for each of its steps that is told what nobody else may read.

Pure: from a spec and the runtime's object to objects. Secrets reach an initializer by the TrainJob's `secretRef`, the
nodes and the exporter by `secretKeyRef`; nothing of them is in the TrainJob. The exporter is a replicated job of our
runtimes that begins when the nodes are done; a patch of the runtime tells it where to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from luthier.errors import UserError
from luthier.jobs.backends.kubernetes_names import (
    API_VERSION,
    EXPORT_MANAGER,
    EXPORTER,
    GPU,
    NODE,
    RECIPE,
    SECRETS,
    SUBMISSION,
    Object,
    containers,
    is_ours,
    replicated_jobs,
)
from luthier.jobs.backends.kubernetes_runtimes import policy_of, trainer_container
from luthier.jobs.node import JOB, pip_variables
from luthier.jobs.spec import DATASET_STEP, MODEL_STEP, JobSpec, Transfer
from luthier.jobs.wire import node_job

STORAGE_URI = "STORAGE_URI"
_LONGEST_VARIABLE = 131_071
"""Bytes of one variable with its name, which is what Linux takes."""
_LONGEST_NAME = 63
_SECRET = "(secret)"
_ALIASES = {"gpu": GPU, "storage": "ephemeral-storage"}
_PLAIN = {"cpu", "memory", "ephemeral-storage"}
_NODE_COMMAND = ("python", "-m", "luthier.jobs.node")
_STARTERS = {"torch": "torchrun", "jax": "python", "xgboost": "python", None: "python"}
"""What runs a function's program, by the policy of the runtime."""


def objects(spec: JobSpec, runtime: Object, token: str) -> list[Object]:
    """A job's objects: its Secrets, and last its TrainJob.

    Args:
        spec: the job.
        runtime: the TrainingRuntime or ClusterTrainingRuntime that it names.
        token: tells this submission from others; it also ends the names of the Secrets.

    Raises:
        UserError: the runtime has no place for what the spec asks.
    """
    _check_name(spec, runtime)
    secrets = _Secrets(spec.name, token)
    trainer = _trainer(spec, runtime, secrets)
    initializer = _initializers(spec, runtime, secrets)
    patches = [*spec.runtime_patches, *_patches(spec, runtime, secrets)]
    managers = [patch.get("manager") for patch in patches]
    if len(set(managers)) < len(managers):
        what = f"several patches are of the manager {next(name for name in managers if managers.count(name) > 1)}"
        raise UserError(what, where="options.RuntimePatch", remedy="make them one")
    annotations = {**spec.annotations, SUBMISSION: token}
    if spec.recipe is not None:
        annotations[RECIPE] = spec.recipe
    if secrets.objects:
        annotations[SECRETS] = ",".join(secret["metadata"]["name"] for secret in secrets.objects)
    train_job: Object = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": _without_nothing(
            {"name": spec.name, "labels": dict(spec.labels) or None, "annotations": annotations}
        ),
        "spec": _without_nothing(
            {
                "runtimeRef": {
                    "apiGroup": API_VERSION.partition("/")[0],
                    "kind": runtime.get("kind", "ClusterTrainingRuntime"),
                    "name": runtime["metadata"]["name"],
                },
                "initializer": initializer or None,
                "trainer": trainer,
                "runtimePatches": patches or None,
                "activeDeadlineSeconds": spec.active_deadline_seconds,
            }
        ),
    }
    return [*secrets.objects, train_job]


def _check_name(spec: JobSpec, runtime: Object) -> None:
    """Refuse a name that leaves no room for those of its pods. JobSet would, when the TrainJob is there already, and
    nobody would hear of it."""
    for job in replicated_jobs(runtime):
        last = spec.num_nodes - 1 if job == NODE else 0
        room = _LONGEST_NAME - len(f"-{job}-0-{last}-abcde")
        if len(spec.name) > room:
            what = (
                f'has {len(spec.name)} characters, and names of pods of runtime "{spec.runtime}" leave room for {room}'
            )
            raise UserError(what, where=spec.name, remedy="choose a shorter name")


class _Secrets:
    """The Secrets of a job in the making."""

    def __init__(self, job: str, token: str) -> None:
        self._job, self._token = job, token
        self.objects: list[Object] = []

    def add(self, step: str, values: Mapping[str, str]) -> str:
        """Keep values for a step; returns the name of its Secret."""
        name = f"{self._job}-{step}-{self._token}"
        self.objects.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name},
                "type": "Opaque",
                "stringData": dict(values),
            }
        )
        return name

    def references(self, step: str, values: Mapping[str, str]) -> list[Object]:
        """Keep values for a step; returns variables of a container that have them."""
        if not values:
            return []
        secret = self.add(step, values)
        return [{"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key in values]


# --- nodes ------------------------------------------------------------------------------------------------------------


def _trainer(spec: JobSpec, runtime: Object, secrets: _Secrets) -> Object:
    container = trainer_container(runtime)
    if container is None:
        raise UserError(f'runtime "{spec.runtime}" has no container named node', where="runtime")
    command: tuple[str, ...] = spec.command or ()
    hidden = dict(spec.env)  # a variable may be a token as well as anything else
    env: list[Object] = []
    if spec.config is not None:
        if not is_ours(runtime):
            raise UserError(
                f'runtime "{spec.runtime}" does not run Luthier, and reads no config of ours',
                where="runtime",
                remedy="name one that begins with luthier",
            )
        command = _NODE_COMMAND
    elif spec.function is not None:
        command = _function_command(spec, runtime)
        hidden |= pip_variables(spec.function.pip_index_urls)
    elif spec.files:
        command = _bare(*command)
    if spec.config is not None or spec.function is not None or spec.files:
        env.append({"name": JOB, "value": _job(spec)})
    return _without_nothing(
        {
            "image": spec.image,
            "command": [literal(word) for word in command] or None,
            "args": [literal(word) for word in spec.args] or None,
            "env": [*env, *secrets.references(NODE, hidden)] or None,
            "numNodes": spec.num_nodes,
            "numProcPerNode": spec.nproc_per_node if spec.nproc_per_node != "auto" else None,
            "resourcesPerNode": _resources(spec.resources_per_node, container),
        }
    )


def _job(spec: JobSpec) -> str:
    """What the node reads, for a variable."""
    text = json.dumps(node_job(spec, with_files=True)).replace("$", "\\u0024")
    if (size := len(f"{JOB}={text}".encode())) > _LONGEST_VARIABLE:
        raise UserError(
            f"its config, function and files take {size} bytes, and a pod is told {_LONGEST_VARIABLE} at most",
            where=spec.name,
            remedy="put large files into the image or the data set",
        )
    return text


def _function_command(spec: JobSpec, runtime: Object) -> tuple[str, ...]:
    """What runs a function: our node where our image is, a text of its own in any other."""
    if spec.image is None and is_ours(runtime):
        return _NODE_COMMAND
    policy = policy_of(runtime)
    if policy not in _STARTERS:
        raise UserError(
            f'functions are started by torchrun, and runtime "{spec.runtime}" starts its nodes by {policy}',
            where="runtime",
            remedy="use one whose policy is torch, or CustomTrainerContainer with TrainerCommand",
        )
    return _bare(_STARTERS[policy])


def _bare(*words: str) -> tuple[str, ...]:
    """What does a job in an image that may have no Luthier."""
    text = files("luthier.jobs.backends").joinpath("kubernetes_function.py").read_text(encoding="utf-8")
    return ("python", "-c", text, *words)


def _resources(asked: Mapping[str, Any] | None, container: Object) -> Object | None:
    """Limits and requests of a node. A TrainJob's take the place of the runtime's whole; but whoever says how much
    memory a node has does not mean that it has no GPU, so the runtime's devices stay unless others are named."""
    if asked is None:
        return None
    named: dict[str, Any] = {}
    for name, value in asked.items():
        key = name.lower() if name.lower() in {*_ALIASES, *_PLAIN} or name.lower().startswith("mig-") else name
        key = f"nvidia.com/{key}" if key.startswith("mig-") else _ALIASES.get(key, key)
        named[key] = value if isinstance(value, int) else str(value)
    if not any("/" in name for name in named):
        limits = (container.get("resources") or {}).get("limits") or {}
        named |= {name: value for name, value in limits.items() if "/" in name}
    return {"limits": named, "requests": dict(named)}


# --- initializers and exporter ----------------------------------------------------------------------------------------


def _initializers(spec: JobSpec, runtime: Object, secrets: _Secrets) -> Object:
    found: Object = {}
    jobs = replicated_jobs(runtime)
    for field, step, transfer in (("dataset", DATASET_STEP, spec.dataset), ("model", MODEL_STEP, spec.model)):
        there = step in jobs and step in containers(jobs[step])
        if transfer is not None:
            if not there:
                raise UserError(
                    f'runtime "{spec.runtime}" has no {step}',
                    where=f"initializer.{field}",
                    remedy="use a runtime that has one, as those of Luthier do",
                )
            found[field] = _initializer(step, transfer, secrets)
        elif there and is_ours(runtime):
            found[field] = {"storageUri": ""}  # nothing is fetched, rather than what the runtime says
    return found


def _initializer(step: str, transfer: Transfer, secrets: _Secrets) -> Object:
    env = _variables({name: value for name, value in transfer.env.items() if name != STORAGE_URI})
    found: Object = {"storageUri": literal(transfer.env[STORAGE_URI])}
    if env:
        found["env"] = env
    if transfer.secrets:
        found["secretRef"] = {"name": secrets.add(step, transfer.secrets)}
    return found


def _patches(spec: JobSpec, runtime: Object, secrets: _Secrets) -> list[Object]:
    jobs = replicated_jobs(runtime)
    patches = []
    if spec.exporter is not None:
        if EXPORTER not in jobs or EXPORTER not in containers(jobs[EXPORTER]):
            raise UserError(
                f'runtime "{spec.runtime}" has no exporter',
                where="exporter",
                remedy="use a runtime that has one, as those of Luthier do",
            )
        env = _variables(spec.exporter.env) + secrets.references(EXPORTER, spec.exporter.secrets)
        patches.append(_patch(EXPORT_MANAGER, EXPORTER, {"containers": [{"name": EXPORTER, "env": env}]}))
    return patches


def _patch(manager: str, job: str, pod: Object) -> Object:
    patched = {"name": job, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}}}


def exports(train_job: Object) -> bool:
    """Whether a TrainJob asks for an export."""
    for patch in train_job["spec"].get("runtimePatches") or []:
        template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        for job in (template.get("spec") or {}).get("replicatedJobs") or []:
            container = containers(job).get(EXPORTER) if job["name"] == EXPORTER else None
            if container is not None and any(entry["name"] == STORAGE_URI for entry in container.get("env") or []):
                return True
    return False


def is_of(train_job: Object, other: Object) -> bool:
    """Whether two TrainJobs are of the same submission."""
    one, two = ((it["metadata"].get("annotations") or {}).get(SUBMISSION) for it in (train_job, other))
    return one is not None and one == two


def secret_names(train_job: Object) -> Sequence[str]:
    """Names of the Secrets that were made for a TrainJob."""
    names: str = (train_job["metadata"].get("annotations") or {}).get(SECRETS) or ""
    return names.split(",") if names else []


def shown(made: Sequence[Object]) -> list[Object]:
    """Objects for people to look at: of Secrets the names of the values alone."""
    return [
        {**it, "stringData": dict.fromkeys(it["stringData"], _SECRET)} if it["kind"] == "Secret" else it for it in made
    ]


def literal(text: str) -> str:
    """Text that a pod reads as it is: Kubernetes puts variables' values in where it finds $(NAME), and $ for $$.

    >>> literal("echo $$ $(date)")
    'echo $$$$ $$(date)'
    """
    return text.replace("$", "$$")


def _variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def _without_nothing(fields: Object) -> Object:
    return {name: value for name, value in fields.items() if value is not None}
