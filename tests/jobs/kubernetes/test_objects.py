"""What a job becomes: every object passes the cluster's gates, says all that the spec says, and no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import UserError
from luthier.jobs.backends.kubernetes_objects import objects
from luthier.jobs.manifests import job_objects
from luthier.jobs.node import read_job
from luthier.jobs.spec import Function, JobSpec, Transfer
from tests.jobs.kubernetes.admission import plugin_refusals, refusals
from tests.jobs.kubernetes.jobset import expanded, jobset, seen
from tests.jobs.kubernetes.test_manifests import OURS, REPLACEMENTS, UPSTREAM

RUN = {"model": "model", "data": {"train": [{"path": "dataset"}]}, "output": "output"}
CONFIG = JobSpec("job", "luthier-qwen2.5-0.5b", "luthier", engine="luthier", config=RUN)
FUNCTION = Function("def train(steps):\n    print('$$', '$(HOME)', steps)\n", "train", {"steps": 3}, ("six",))
TOLERATE = {
    "manager": "trainer.kubeflow.org/kubeflow-sdk",
    "trainingRuntimeSpec": {
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "spec": {"template": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}}
                        },
                    }
                ]
            }
        }
    },
}


def made(spec: JobSpec, runtime: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The TrainJob of a spec, which every gate has admitted, and the values of its Secrets."""
    runtime = runtime if runtime is not None else (OURS | REPLACEMENTS)[spec.runtime]
    *secrets, train_job = objects(spec, runtime, "0")
    assert refusals(train_job) == []
    assert plugin_refusals(train_job, runtime) == []
    suspended = json.loads(json.dumps(train_job))
    suspended["spec"]["suspend"] = True
    assert refusals(suspended, old=train_job) == []
    return train_job, {secret["metadata"]["name"]: secret["stringData"] for secret in secrets}


def containers(spec: JobSpec, runtime: dict[str, Any] | None = None) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Step -> command and environment of its process."""
    runtime = runtime if runtime is not None else (OURS | REPLACEMENTS)[spec.runtime]
    train_job, secrets = made(spec, runtime)
    found = {}
    for job in jobset(train_job, runtime):
        labels = {"jobset.sigs.k8s.io/jobset-name": spec.name, "batch.kubernetes.io/job-completion-index": "0"}
        container = job.pod["containers"][0]
        environment = seen(container, labels, secrets)
        found[job.name] = ([expanded(word, environment) for word in container.get("command") or []], environment)
    return found


def test_objects_are_shown_without_a_cluster() -> None:
    rows = Transfer({"STORAGE_URI": "hf://a/b"}, {"ACCESS_TOKEN": "hidden"})
    spec = JobSpec("job", "luthier-qwen2.5-0.5b", "luthier", engine="luthier", config=RUN, dataset=rows)
    *secrets, train_job = job_objects(spec)
    assert refusals(train_job) == []
    assert train_job == objects(spec, OURS[spec.runtime], "TOKEN")[-1]
    assert [secret["stringData"] for secret in secrets] == [{"ACCESS_TOKEN": "(secret)"}]


def test_a_config_travels_whole() -> None:
    text = {"model": "model", "data": {"train": [{"path": "dataset", "system_prompt": 'a "b" $$ $(HOME) ü: [c]'}]}}
    spec = JobSpec("job", "luthier", "luthier", engine="luthier", config=text, files={"chat.jinja": "{{ $x }}"})
    command, environment = containers(spec)["node"]
    assert command == ["python", "-m", "luthier.jobs.node"]
    job = read_job(environment)
    assert job["config"] == text
    assert job["files"] == {"chat.jinja": "{{ $x }}"}


def test_nodes_meet_by_what_the_plugin_sets() -> None:
    spec = JobSpec("job", "luthier-llama3.1-70b", "luthier", 3, 4, engine="luthier", config=RUN)
    train_job, _ = made(spec)
    assert train_job["spec"]["trainer"]["numNodes"] == 3
    assert not any(entry["name"].startswith("PET_") for entry in train_job["spec"]["trainer"]["env"])
    _, environment = containers(spec)["node"]
    assert {name: value for name, value in environment.items() if name.startswith("PET_")} == {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }


def test_secrets_reach_their_step_alone() -> None:
    spec = JobSpec(
        name="job",
        runtime="luthier-qwen2.5-0.5b",
        framework="luthier",
        engine="luthier",
        config=RUN,
        env={"WANDB_API_KEY": "node-secret$$"},
        dataset=Transfer({"STORAGE_URI": "s3://b/d", "ENDPOINT": "http://s3"}, {"SECRET_ACCESS_KEY": "dataset-secret"}),
        model=Transfer({"STORAGE_URI": "hf://a/m", "IGNORE_PATTERNS": ""}, {"ACCESS_TOKEN": "model-secret"}),
        exporter=Transfer({"STORAGE_URI": "hf://a/e", "EXPORT_FORM": "adapter"}, {"ACCESS_TOKEN": "export-secret"}),
    )
    train_job, secrets = made(spec)
    assert "secret" not in json.dumps([train_job["spec"]["trainer"], *train_job["spec"]["runtimePatches"]]).replace(
        "secretKeyRef", ""
    )
    assert not any(value in json.dumps(train_job) for values in secrets.values() for value in values.values())
    assert sorted(secrets) == sorted(train_job["metadata"]["annotations"]["jobs.luthier/secrets"].split(","))
    steps = {step: environment for step, (_, environment) in containers(spec).items()}
    dataset = {"STORAGE_URI": "s3://b/d", "ENDPOINT": "http://s3", "SECRET_ACCESS_KEY": "dataset-secret"}
    assert steps["dataset-initializer"] == dataset
    model = {"STORAGE_URI": "hf://a/m", "IGNORE_PATTERNS": "", "ACCESS_TOKEN": "model-secret"}
    assert steps["model-initializer"] == model
    export = {"STORAGE_URI": "hf://a/e", "EXPORT_FORM": "adapter", "ACCESS_TOKEN": "export-secret"}
    assert steps["exporter"] == export
    assert steps["node"]["WANDB_API_KEY"] == "node-secret$$"
    assert "ACCESS_TOKEN" not in steps["node"]


def test_nothing_is_fetched_or_taken_elsewhere_that_nobody_asked_for() -> None:
    steps = {step: environment for step, (_, environment) in containers(CONFIG).items()}
    assert [steps[step].get("STORAGE_URI") for step in ("dataset-initializer", "model-initializer")] == ["", ""]
    assert "STORAGE_URI" not in steps["exporter"]


def test_metadata_deadline_and_patches_are_the_specs() -> None:
    spec = JobSpec(
        name="job",
        runtime="luthier",
        framework="luthier",
        recipe="lora_finetune_distributed",
        engine="luthier",
        config=RUN,
        labels={"team": "nlp"},
        annotations={"why": "because: of $this"},
        active_deadline_seconds=60,
        runtime_patches=(TOLERATE,),
    )
    train_job, _ = made(spec)
    assert train_job["metadata"] == {
        "name": "job",
        "labels": {"team": "nlp"},
        "annotations": {
            "why": "because: of $this",
            "jobs.luthier/recipe": "lora_finetune_distributed",
            "jobs.luthier/submission": "0",
        },
    }
    assert train_job["spec"]["activeDeadlineSeconds"] == 60
    assert train_job["spec"]["runtimePatches"] == [TOLERATE]


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        (None, None),
        ({"gpu": 2}, {"nvidia.com/gpu": 2}),
        ({"GPU": 0, "cpu": 0.5}, {"nvidia.com/gpu": 0, "cpu": "0.5"}),
        ({"memory": "64Gi"}, {"memory": "64Gi", "nvidia.com/gpu": "1"}),
        ({"mig-1g.5gb": 1, "storage": "1Gi"}, {"nvidia.com/mig-1g.5gb": 1, "ephemeral-storage": "1Gi"}),
        ({"example.com/NPU": 4}, {"example.com/NPU": 4}),
    ],
)
def test_resources_are_kubernetes_own(asked: dict[str, Any] | None, limits: dict[str, Any] | None) -> None:
    spec = JobSpec("job", "luthier-qwen2.5-0.5b", "luthier", engine="luthier", config=RUN, resources_per_node=asked)
    resources = made(spec)[0]["spec"]["trainer"].get("resourcesPerNode")
    assert resources == ({"limits": limits, "requests": limits} if limits is not None else None)


@pytest.mark.parametrize("name", ["torch-distributed", "jax-distributed", "xgboost-distributed"])
def test_a_function_runs_in_an_image_without_luthier(name: str, tmp_path: Path) -> None:
    spec = JobSpec(
        "job", name, "torch", function=Function(FUNCTION.source, "train", {"steps": 3}), files={"a/b.txt": "laid $$"}
    )
    (python, flag, text, starter), environment = containers(spec, UPSTREAM[name])["node"]
    assert (python, flag, starter) == ("python", "-c", "torchrun" if name.startswith("torch") else "python")
    ran = subprocess.run(
        [sys.executable, flag, text, sys.executable], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == ("$$ $(HOME) 3\n", "")
    assert (tmp_path / "a" / "b.txt").read_text() == "laid $$"


def test_a_function_runs_by_our_node_in_our_image() -> None:
    command, environment = containers(JobSpec("job", "torch-distributed", "torch", function=FUNCTION))["node"]
    assert command == ["python", "-m", "luthier.jobs.node"]
    assert read_job(environment)["function"] == {
        "source": FUNCTION.source,
        "name": "train",
        "args": {"steps": 3},
        "packages": ["six"],
    }
    elsewhere = JobSpec("job", "torch-distributed", "torch", function=FUNCTION, image="pytorch/pytorch")
    assert made(elsewhere)[0]["spec"]["trainer"]["command"][:2] == ["python", "-c"]


def test_addresses_of_package_indexes_are_secret() -> None:
    indexes = ("https://me:pass@one/simple", "https://two/simple")
    function = Function(FUNCTION.source, "train", {}, ("six",), indexes)
    spec = JobSpec("job", "torch-distributed", "torch", function=function)
    assert "pass" not in json.dumps(made(spec)[0])
    _, environment = containers(spec)["node"]
    assert (environment["PIP_INDEX_URL"], environment["PIP_EXTRA_INDEX_URL"]) == indexes


def test_a_container_keeps_its_own_entry_point() -> None:
    spec = JobSpec("job", "torch-distributed", "torch", image="mine:1", env={"A": "$(B)"})
    train_job, _ = made(spec)
    trainer = train_job["spec"]["trainer"]
    assert (trainer["image"], "command" in trainer) == ("mine:1", False)
    assert containers(spec)["node"][1]["A"] == "$(B)"


def test_a_command_is_taken_word_for_word() -> None:
    words = ("bash", "-c", "echo $$ $(date) $HOME")
    assert containers(JobSpec("job", "torch-distributed", "torch", command=words))["node"][0] == list(words)
    asked = made(JobSpec("job", "torch-distributed", "torch", image="mine:1", args=("-x", "$$")))[0]["spec"]["trainer"]
    assert (asked.get("command"), asked["args"]) == (None, ["-x", "$$$$"])


def test_a_name_leaves_room_for_those_of_pods() -> None:
    made(JobSpec(33 * "a", "torch-distributed", "torch", command=("true",), num_nodes=11))
    made(
        JobSpec(47 * "a", "torch-distributed", "torch", command=("true",), num_nodes=11), UPSTREAM["torch-distributed"]
    )
    with pytest.raises(UserError) as caught:
        made(JobSpec(34 * "a", "torch-distributed", "torch", command=("true",)))
    assert str(caught.value) == (
        f'{34 * "a"}: has 34 characters, and names of pods of runtime "torch-distributed" leave room for 33; '
        "choose a shorter name"
    )


ROWS = Transfer({"STORAGE_URI": "hf://a/b"})


@pytest.mark.parametrize(
    ("spec", "runtime", "said"),
    [
        (
            JobSpec("job", "torch-distributed", "torch", command=("true",), dataset=ROWS),
            UPSTREAM["torch-distributed"],
            'initializer.dataset: runtime "torch-distributed" has no dataset-initializer; '
            "use a runtime that has one, as those of Luthier do",
        ),
        (
            JobSpec("job", "torch-distributed", "torch", command=("true",), exporter=ROWS),
            UPSTREAM["torch-distributed"],
            'exporter: runtime "torch-distributed" has no exporter; use a runtime that has one, as those of Luthier do',
        ),
        (
            JobSpec("job", "deepspeed-distributed", "deepspeed", function=FUNCTION),
            UPSTREAM["deepspeed-distributed"],
            'runtime: functions are started by torchrun, and runtime "deepspeed-distributed" starts its nodes by mpi; '
            "use one whose policy is torch, or CustomTrainerContainer with TrainerCommand",
        ),
        (
            JobSpec("job", "torchtune-llama3.2-1b", "torchtune", engine="luthier", config=RUN),
            UPSTREAM["torchtune-llama3.2-1b"],
            'runtime: runtime "torchtune-llama3.2-1b" does not run Luthier, and reads no config of ours; '
            "name one that begins with luthier",
        ),
        (
            JobSpec("job", "bare", "torch", command=("true",)),
            {"metadata": {"name": "bare"}},
            'runtime: runtime "bare" has no container named node',
        ),
        (
            JobSpec("job", "luthier", "luthier", engine="luthier", config=RUN, files={"big": 200_000 * "x"}),
            OURS["luthier"],
            "job: its config, function and files take 200189 bytes, and a pod is told 131071 at most; "
            "put large files into the image or the data set",
        ),
        (
            JobSpec("job", "luthier", "luthier", engine="luthier", config=RUN, runtime_patches=(TOLERATE, TOLERATE)),
            OURS["luthier"],
            "options.RuntimePatch: several patches are of the manager trainer.kubeflow.org/kubeflow-sdk; make them one",
        ),
    ],
)
def test_what_a_runtime_has_no_place_for_is_refused(spec: JobSpec, runtime: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        objects(spec, runtime, "0")
    assert str(caught.value) == said
