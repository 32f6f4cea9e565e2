"""The runtimes of the catalogue as objects of Kubeflow Trainer: `python -m luthier.jobs.manifests DIRECTORY`.

Every runtime has a volume for the workspace; initializers that fetch its model and data set into it; nodes, which train
as the runtime says when a TrainJob says nothing else; and an exporter, which does nothing unless a TrainJob says where
to. A step that is told nothing leaves at once.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from luthier import __version__
from luthier.config.presets import Preset
from luthier.jobs.asked import Asked
from luthier.jobs.backends.kubernetes_names import (
    ANCESTOR,
    API_VERSION,
    EXPORTER,
    FRAMEWORK,
    GPU,
    INDEX,
    JOBSET,
    NODE,
    OURS,
    TRAINER,
    WORKSPACE,
    Object,
)
from luthier.jobs.backends.kubernetes_objects import objects, shown
from luthier.jobs.build import build
from luthier.jobs.node import JOB
from luthier.jobs.runtimes import ANY_FUNCTION, IMAGE, KEP_PREFIX, PREFIX, builtin, find, preset_of
from luthier.jobs.spec import DATASET_STEP, MODEL_STEP, JobSpec
from luthier.jobs.types import Framework, Runtime
from luthier.jobs.wire import node_job

GROUP_OF_IMAGE = 1000
"""Group of the user that Luthier's image runs as; the workspace belongs to it."""
TORCHTUNE = ("llama3.2-1b", "llama3.2-3b", "llama3.3-70b", "qwen2.5-1.5b")
"""Models for which Kubeflow Trainer admits `tune run`, which is all that its SDK's BuiltinTrainer says."""

_VOLUME = "initializer"
_PORT = 29500
_GRACE_SECONDS = 300
_HEADER = "# Written by `make manifests` from the catalogue of presets: do not edit.\n"


def runtime_objects() -> list[Object]:
    """A ClusterTrainingRuntime for each runtime of the catalogue, by name."""
    return [runtime_object(runtime) for runtime in builtin("gpu") if runtime.name != ANY_FUNCTION]


def replacements() -> list[Object]:
    """Runtimes that take the place of Kubeflow's own, under their names: functions find a workspace and initializers,
    and what its SDK says of a BuiltinTrainer is done."""
    known = {runtime.name: runtime for runtime in builtin("gpu")}
    found = [runtime_object(known[ANY_FUNCTION])]
    for model in TORCHTUNE:
        made = runtime_object(known[PREFIX + model])
        made["metadata"]["name"] = KEP_PREFIX + model
        made["metadata"]["labels"][FRAMEWORK] = Framework.TORCHTUNE.value
        found.append(made)
    return found


def job_objects(spec: JobSpec) -> list[Object]:
    """What a job of the catalogue's runtimes becomes on a cluster that has them, with the values of Secrets left out;
    asks no cluster.

    Raises:
        UserError: there is no such runtime, or it has no place for what the spec asks.
    """
    return shown(objects(spec, runtime_object(find(spec.runtime, builtin("gpu"))), "TOKEN"))


def runtime_object(runtime: Runtime) -> Object:
    """The ClusterTrainingRuntime of a runtime.

    Args:
        runtime: one of the catalogue's.
    """
    assert runtime.trainer is not None
    # Kubeflow's torch-distributed asks for no device: whoever brings a function says what it needs.
    gpus = int(runtime.trainer.device_count) if runtime.name != ANY_FUNCTION else None
    nodes = runtime.trainer.num_nodes
    preset = preset_of(runtime)
    jobs = [
        _initializer(DATASET_STEP, "dataset", f"hf://{preset.dataset}" if preset is not None else None),
        _initializer(MODEL_STEP, "model", f"hf://{preset.model}" if preset is not None else None),
        _node(runtime, nodes, gpus),
        _exporter(),
    ]
    volume = {
        "metadata": {"name": _VOLUME},
        "spec": {
            # Several machines must be able to write into it at once.
            "accessModes": ["ReadWriteOnce" if nodes == 1 else "ReadWriteMany"],
            "resources": {"requests": {"storage": f"{_gibibytes(preset)}Gi"}},
        },
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": runtime.name, "labels": {FRAMEWORK: str(runtime.trainer.framework), OURS: "true"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {"spec": {"volumeClaimPolicies": [{"templates": [volume]}], "replicatedJobs": jobs}},
        },
    }


def _initializer(step: str, kind: str, uri: str | None) -> Object:
    env = [{"name": "STORAGE_URI", "value": uri}] if uri is not None else []
    return _job(step, step, _told(f"python -m luthier.jobs.initializers {kind}"), env=env)


def _exporter() -> Object:
    job = _job(EXPORTER, None, _told("python -m luthier.jobs.exporter"))
    return {"name": job.pop("name"), "dependsOn": [{"name": NODE, "status": "Complete"}], **job}


def _node(runtime: Runtime, nodes: int, gpus: int | None) -> Object:
    of_pod = [
        {"name": "JOBSET_NAME", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET}']"}}},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
    ]
    # Kubeflow's torch plugin sets these itself for a TrainJob with a trainer, but for none that names only its runtime.
    plain = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(gpus) if gpus is not None else "auto",
        "PET_MASTER_ADDR": f"$(JOBSET_NAME)-{NODE}-0-0.$(JOBSET_NAME)",
        "PET_MASTER_PORT": str(_PORT),
    }
    if (told := default_job(runtime)) is not None:
        plain = {JOB: json.dumps(told), **plain}
    env = of_pod + [{"name": name, "value": value} for name, value in plain.items()]
    job = _job(NODE, TRAINER, ["python", "-m", "luthier.jobs.pod"], env=env)
    pod = job["template"]["spec"]["template"]["spec"]
    if gpus is not None:
        pod["containers"][0]["resources"] = {"limits": {GPU: str(gpus)}}  # Kubeflow's SDK reads a number as 8.0
    # Processes of a node talk through shared memory, of which a container has 64 MiB by itself.
    pod["containers"][0]["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
    pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    pod["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    waits = [{"name": step, "status": "Complete"} for step in (DATASET_STEP, MODEL_STEP)]
    return {"name": job.pop("name"), "dependsOn": waits, **job}


def default_job(runtime: Runtime) -> dict[str, Any] | None:
    """What nodes do that are told nothing: what `TrainerClient().train(runtime)` does. None where that is refused."""
    preset = preset_of(runtime)
    if preset is None or preset.pictures:
        return None
    return node_job(build(Asked("kubernetes", [runtime], runtime.name)), with_files=True)


def _job(name: str, ancestor: str | None, command: list[str], env: list[Object] | None = None) -> Object:
    """A replicated job of one pod with one container of the same name, in the workspace."""
    container: Object = {
        "name": name,
        "image": IMAGE,
        "command": command,
        "workingDir": WORKSPACE,
        **({"env": env} if env else {}),
        "volumeMounts": [{"name": _VOLUME, "mountPath": WORKSPACE}],
    }
    pod: Object = {
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": GROUP_OF_IMAGE},
        "containers": [container],
    }
    # What fails fails once, as on every backend; a machine that is taken away is no failure.
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    template: Object = {
        "spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": [taken_away]}, "template": {"spec": pod}}
    }
    if ancestor is not None:
        template = {"metadata": {"labels": {ANCESTOR: ancestor}}, **template}
    return {"name": name, "template": template}


def _told(command: str) -> list[str]:
    """A command that runs where there is something to fetch or take elsewhere."""
    return ["sh", "-c", f'test -z "$STORAGE_URI" || exec {command}']


def _gibibytes(preset: Preset | None) -> int:
    """Of a workspace: for each parameter 2 bytes fetched and 2 exported, and two checkpoints with 2 of the weight and 8
    of the optimizer; and room for data."""
    match = re.search(r"-(\d+(?:\.\d+)?)([mb])\b", preset.name) if preset is not None else None
    billions = float(match[1]) / (1 if match[2] == "b" else 1000) if match is not None else 8.0
    return 20 + round(24 * billions)


# --- files ------------------------------------------------------------------------------------------------------------


def manifest_files() -> dict[str, str]:
    """Path below the directory -> text, of all manifests."""
    found = {}
    for place, made in (("base/runtimes", runtime_objects()), ("replacements", replacements())):
        names = [f"{runtime['metadata']['name']}.yaml" for runtime in made]
        for name, runtime in zip(names, made, strict=True):
            found[f"{place}/{name}"] = _text(runtime)
        found[f"{place}/kustomization.yaml"] = _text(_kustomization(names))
    return found


def _kustomization(names: list[str]) -> Object:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": names,
        "images": [{"name": IMAGE, "newTag": __version__}],
    }


def _text(thing: Object) -> str:
    return _HEADER + yaml.safe_dump(thing, sort_keys=False, width=100_000)


def main(directory: Path) -> None:
    """Write all manifests, and take away those of runtimes that are no more."""
    made = manifest_files()
    for old in directory.glob("**/*.yaml"):
        if old.relative_to(directory).as_posix() not in made and old.read_text(encoding="utf-8").startswith(_HEADER):
            old.unlink()
    for name, text in made.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
