"""The pods that Kubeflow Trainer and JobSet make of a TrainJob, as is documented; for the clusters of tests."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from tests.jobs.kubernetes.admission import TUNE, Object, tune_command

_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_FIELDS = {"dataset-initializer": "dataset", "model-initializer": "model"}


@dataclass
class ReplicatedJob:
    """So many pods, which begin when others are done."""

    name: str
    pod: Object
    count: int
    after: Mapping[str, str]


def jobset(train_job: Object, runtime: Object) -> list[ReplicatedJob]:
    """What a TrainJob becomes."""
    spec, policy = train_job["spec"], runtime["spec"]["mlPolicy"]
    trainer = spec.get("trainer") or {}
    nodes = trainer.get("numNodes") or policy.get("numNodes") or 1
    made = []
    for job in deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"]):
        step = ((job["template"].get("metadata") or {}).get("labels") or {}).get(_ANCESTOR)
        pod = job["template"]["spec"]["template"]["spec"]
        for container in pod["containers"]:
            said = (spec.get("initializer") or {}).get(_FIELDS.get(step, ""))
            if said is not None and container["name"] == step:
                _tell_initializer(container, said)
            if step == "trainer" and container["name"] == "node" and spec.get("trainer") is not None:
                _tell_node(container, train_job, runtime, nodes)
        _patch(pod, job["name"], spec.get("runtimePatches") or [])
        after = {it["name"]: it["status"] for it in job.get("dependsOn") or []}
        made.append(ReplicatedJob(job["name"], pod, nodes if step == "trainer" else 1, after))
    return made


def _tell_initializer(container: Object, said: Object) -> None:
    if "storageUri" in said:
        _upsert(container, [{"name": "STORAGE_URI", "value": said["storageUri"]}])
    _upsert(container, said.get("env") or [])
    if "secretRef" in said:
        container.setdefault("envFrom", []).append({"secretRef": said["secretRef"]})


def _tell_node(container: Object, train_job: Object, runtime: Object, nodes: int) -> None:
    trainer, name = train_job["spec"]["trainer"], train_job["metadata"]["name"]
    for key, field in (("image", "image"), ("command", "command"), ("args", "args"), ("resourcesPerNode", "resources")):
        if key in trainer:
            container[field] = trainer[key]
    _upsert(container, trainer.get("env") or [])
    if "torch" not in runtime["spec"]["mlPolicy"]:
        return
    processes = trainer.get("numProcPerNode") or "auto"
    limits = (trainer.get("resourcesPerNode") or {}).get("limits") or {}
    if processes == "auto" and limits and not any("gpu" in key.lower() for key in limits):
        processes = limits.get("cpu", 1)
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    plain = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": processes}
    if trainer.get("command") == TUNE:
        container["command"] = tune_command(train_job, runtime)
    else:
        plain |= {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": 29500}
    _upsert(container, [{"name": key, "value": str(value)} for key, value in plain.items()])
    _upsert(container, [{"name": "PET_NODE_RANK", "valueFrom": rank}])


def _patch(pod: Object, job: str, patches: list[Object]) -> None:
    for patch in patches:
        for patched in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            change = patched["template"]["spec"]["template"].get("spec") or {}
            if patched["name"] != job:
                continue
            for container in change.get("containers") or []:
                (found,) = [it for it in pod["containers"] if it["name"] == container["name"]]
                _upsert(found, container.get("env") or [])
            pod |= {key: value for key, value in change.items() if key != "containers"}


def _upsert(container: Object, env: list[Object]) -> None:
    """Put variables in, each in the place of the one of its name."""
    for entry in env:
        old = container.get("env") or []
        names = [it["name"] for it in old]
        if entry["name"] in names:
            old[names.index(entry["name"])] = entry
        else:
            container["env"] = [*old, entry]


def seen(container: Object, labels: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The environment of a process in a container: variables' values put in for $(NAME), $ for $$, Secrets read.

    Args:
        container: with its `env` and `envFrom`.
        labels: of its pod, with its annotations.
        secrets: name -> values.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        found |= secrets[source["secretRef"]["name"]]
    for entry in container.get("env") or []:
        source = entry.get("valueFrom") or {}
        if "secretKeyRef" in source:
            found[entry["name"]] = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            found[entry["name"]] = labels[source["fieldRef"]["fieldPath"].split("'")[1]]
        else:
            found[entry["name"]] = expanded(entry.get("value", ""), found)
    return found


def expanded(text: str, values: Mapping[str, str]) -> str:
    """As Kubernetes expands a value: $$ is $, $(NAME) is a value where there is one."""
    made, place = "", 0
    while place < len(text):
        if text.startswith("$$", place):
            made, place = made + "$", place + 2
        elif text.startswith("$(", place) and (end := text.find(")", place)) > 0 and text[place + 2 : end] in values:
            made, place = made + values[text[place + 2 : end]], end + 1
        else:
            made, place = made + text[place], place + 1
    return made
