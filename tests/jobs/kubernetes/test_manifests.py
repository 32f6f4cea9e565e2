"""The manifests are the catalogue's, and a cluster admits them; Kubeflow's own runtimes are read beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from luthier.config.load import check_config
from luthier.config.presets import presets
from luthier.jobs.backends.kubernetes_runtimes import runtime_of
from luthier.jobs.manifests import manifest_files
from luthier.jobs.node import read_job
from luthier.jobs.runtimes import builtin
from luthier.jobs.types import Framework, RuntimeKind, TrainerType
from tests.jobs.kubernetes.admission import refusals, upstream_runtimes
from tests.jobs.kubernetes.jobset import jobset, seen

MANIFESTS = Path(__file__).parents[3] / "manifests"
OURS = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((MANIFESTS / "base/runtimes").glob("luthier*.yaml"))
}
REPLACEMENTS = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((MANIFESTS / "replacements").glob("torch*.yaml"))
}
UPSTREAM = {found["metadata"]["name"]: found for found in upstream_runtimes()}


def node_of(runtime: dict[str, Any]) -> dict[str, Any]:
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (node,) = [job for job in jobs if job["name"] == "node"]
    return node["template"]["spec"]["template"]["spec"]["containers"][0]


def test_manifests_are_current() -> None:
    made = manifest_files()
    there = {path.relative_to(MANIFESTS).as_posix(): path.read_text() for path in MANIFESTS.rglob("*.yaml")}
    assert set(there) == set(made), "run `make manifests`"
    assert [name for name in made if there[name] != made[name]] == [], "run `make manifests`"


def test_there_is_one_for_each_preset_and_one_for_any_model() -> None:
    assert set(OURS) == {"luthier", *(f"luthier-{name}" for name in presets())}
    for name in ("base/runtimes", "replacements"):
        listed = yaml.safe_load((MANIFESTS / name / "kustomization.yaml").read_text())
        assert sorted([*listed["resources"], "kustomization.yaml"]) == sorted(
            path.name for path in (MANIFESTS / name).iterdir()
        )


@pytest.mark.parametrize("name", [*OURS, *REPLACEMENTS])
def test_a_cluster_admits_it(name: str) -> None:
    assert refusals((OURS | REPLACEMENTS)[name]) == []


@pytest.mark.parametrize("name", UPSTREAM)
def test_the_gates_admit_upstreams(name: str) -> None:
    assert refusals(UPSTREAM[name]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it["spec"].update(extra=1), "extra"),
        (lambda it: it["spec"]["mlPolicy"].update(mpi={}), "Only one of the policy"),
        (lambda it: it["spec"]["template"]["spec"]["replicatedJobs"][0].update(dependson=[]), "dependson"),
        (lambda it: node_of(it)["env"].append(node_of(it)["env"][0]), "twice"),
        (
            lambda it: it["spec"]["template"]["spec"].update(startupPolicy={"startupPolicyOrder": "InOrder"}),
            "exclusive",
        ),
    ],
)
def test_the_gates_refuse(change: Any, said: str) -> None:
    broken = json.loads(json.dumps(OURS["luthier-qwen2.5-0.5b"]))
    change(broken)
    assert said in " ".join(refusals(broken))


@pytest.mark.parametrize("name", OURS)
def test_it_is_the_catalogues_runtime(name: str) -> None:
    (mine,) = [runtime for runtime in builtin("gpu") if runtime.name == name]
    assert mine.trainer is not None
    mine.trainer.command = ("python", "-m", "luthier.jobs.pod")
    assert runtime_of(OURS[name]) == mine


def test_upstreams_are_read() -> None:
    read = {name: runtime_of(found) for name, found in UPSTREAM.items()}
    assert {name: (it.trainer.framework, it.trainer.trainer_type) for name, it in read.items() if it.trainer} == {
        "deepspeed-distributed": (Framework.DEEPSPEED, TrainerType.CUSTOM_TRAINER),
        "jax-distributed": (Framework.JAX, TrainerType.CUSTOM_TRAINER),
        "mlx-distributed": (Framework.MLX, TrainerType.CUSTOM_TRAINER),
        "torch-distributed": (Framework.TORCH, TrainerType.CUSTOM_TRAINER),
        "torch-distributed-with-cache": (Framework.TORCH, TrainerType.CUSTOM_TRAINER),
        "torchtune-llama3.2-1b": (Framework.TORCHTUNE, TrainerType.BUILTIN_TRAINER),
        "torchtune-llama3.2-3b": (Framework.TORCHTUNE, TrainerType.BUILTIN_TRAINER),
        "torchtune-qwen2.5-1.5b": (Framework.TORCHTUNE, TrainerType.BUILTIN_TRAINER),
        "xgboost-distributed": (Framework.XGBOOST, TrainerType.CUSTOM_TRAINER),
    }
    llama = read["torchtune-llama3.2-1b"]
    assert llama.trainer is not None
    assert llama.pretrained_model == "meta-llama/Llama-3.2-1B-Instruct"
    assert (llama.trainer.device, llama.trainer.device_count, llama.trainer.num_nodes) == ("gpu", 2, 1)
    assert llama.trainer.command[:2] == ("tune", "run")
    commands = {name: it.trainer.command for name, it in read.items() if it.trainer}
    assert commands["torch-distributed"] == ("torchrun",)
    assert commands["deepspeed-distributed"] == ("mpirun",)


@pytest.mark.parametrize(
    ("found", "framework"),
    [
        ({"metadata": {"name": "bare"}, "kind": "TrainingRuntime"}, None),
        ({"metadata": {"name": "bare", "labels": None}, "spec": {"mlPolicy": None, "template": {"spec": {}}}}, None),
        ({**UPSTREAM["jax-distributed"], "metadata": {"name": "bare"}}, "jax"),
    ],
)
def test_one_that_lacks_its_labels_is_still_named(found: dict[str, Any], framework: str | None) -> None:
    runtime = runtime_of(found)
    assert runtime.name == "bare"
    assert (runtime.trainer.framework if runtime.trainer else None) == framework
    assert runtime.kind == RuntimeKind(found.get("kind", "ClusterTrainingRuntime"))


@pytest.mark.parametrize("name", [name for name in OURS if "vision" not in name and name != "luthier"])
def test_a_job_that_names_only_its_runtime_trains(name: str) -> None:
    """Kubeflow sets PET_* only where there is a trainer in the TrainJob: its nodes find each other all the same."""
    runtime = OURS[name]
    made = jobset({"metadata": {"name": "mine"}, "spec": {"runtimeRef": {"name": name}}}, runtime)
    assert [job.name for job in made] == ["dataset-initializer", "model-initializer", "node", "exporter"]
    node = made[2]
    pod = {"jobset.sigs.k8s.io/jobset-name": "mine", "batch.kubernetes.io/job-completion-index": str(node.count - 1)}
    environment = seen(node.pod["containers"][0], pod, {})
    job = read_job(environment)
    assert check_config(job["config"])[1] == []
    assert environment["PET_NNODES"] == str(job["num_nodes"]) == str(node.count)
    assert environment["PET_NPROC_PER_NODE"] == str(job["nproc_per_node"])
    assert environment["PET_NODE_RANK"] == str(node.count - 1)
    assert environment["PET_MASTER_ADDR"] == "mine-node-0-0.mine"
