"""The gates refuse what a cluster refuses: without that, passing them would mean nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from luthier.jobs.backends.kubernetes_objects import objects
from luthier.jobs.spec import JobSpec, Transfer
from tests.jobs.kubernetes.admission import plugin_refusals, refusals
from tests.jobs.kubernetes.test_manifests import OURS, REPLACEMENTS

Change = Callable[[dict[str, Any]], Any]
PRESET = "luthier-qwen2.5-0.5b"
GOOD = objects(
    JobSpec(
        name="job",
        runtime=PRESET,
        framework="luthier",
        num_nodes=2,
        nproc_per_node=2,
        engine="luthier",
        config={"model": "model"},
        dataset=Transfer({"STORAGE_URI": "hf://a/b"}),
        exporter=Transfer({"STORAGE_URI": "hf://a/b"}),
        active_deadline_seconds=5,
    ),
    OURS[PRESET],
    "0",
)[-1]


def changed(change: Change, thing: dict[str, Any] = GOOD) -> dict[str, Any]:
    made = copy.deepcopy(thing)
    change(made)
    return made


def trainer(**fields: Any) -> Change:
    return lambda job: job["spec"]["trainer"].update(fields)


def patched(job: dict[str, Any]) -> dict[str, Any]:
    (patch,) = job["spec"]["runtimePatches"]
    found: dict[str, Any] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    return found


def test_what_is_good_passes() -> None:
    assert refusals(GOOD) == []
    assert plugin_refusals(GOOD, OURS[PRESET]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (trainer(numNodes="two"), "'two' is not of type 'integer'"),
        (trainer(numNodes=-1), "-1 is less than the minimum of 0"),
        (trainer(numProcPerNode=0), "numProcPerNode must be greater than or equal to 1"),
        (trainer(env=[{"name": "A"}, {"name": "A"}]), "('A',) is there twice"),
        (trainer(env=[{"name": str(number)} for number in range(129)]), "is too long"),
        (trainer(working_dir="/"), "working_dir"),
        (lambda job: job["spec"].pop("runtimeRef"), "'runtimeRef' is a required property"),
        (lambda job: job["spec"].update(activeDeadlineSeconds=0), "0 is less than the minimum of 1"),
        (lambda job: job["spec"].update(managedBy="me"), "ManagedBy must be"),
        (lambda job: job["spec"]["initializer"]["dataset"].update(storageUri="a/b"), "must be a valid URI"),
        (lambda job: job["metadata"].update(name="Bad_Name"), "must match RFC 1035"),
        (lambda job: job["metadata"].update(name=64 * "a"), "must be no more than 63 characters"),
        (lambda job: job.update(status={"trainerStatus": {"progressPercentage": 1}}), "lastUpdatedTime is required"),
        (lambda job: patched(job).update(replicas=0), "replicas"),
    ],
)
def test_schema_and_rules_refuse(change: Change, said: str) -> None:
    assert said in " ".join(refusals(changed(change)))


@pytest.mark.parametrize(
    "change",
    [
        trainer(numNodes=3),
        lambda job: job["spec"].update(activeDeadlineSeconds=6),
        lambda job: job["spec"]["initializer"]["dataset"].update(storageUri="hf://c/d"),
        lambda job: job["spec"]["runtimeRef"].update(name="luthier"),
        lambda job: patched(job)["template"]["spec"]["template"]["spec"]["containers"].clear(),
    ],
)
def test_what_must_not_change_is_held(change: Change) -> None:
    assert "field is immutable" in " ".join(refusals(changed(change), old=GOOD))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (trainer(env=[{"name": "PET_NNODES", "value": "2"}]), "must not have reserved envs ['PET_NNODES']"),
        (lambda job: patched(job).update(name="other"), "there is no job other"),
        (
            lambda job: patched(job)["template"]["spec"]["template"]["spec"]["containers"][0].update(name="x"),
            "exporter/x is not in the runtime",
        ),
        (lambda job: job["spec"]["runtimePatches"][0].update(manager="me"), "manager me is no domain-prefixed path"),
        (lambda job: job["metadata"].update(name=34 * "a"), "pod names generated"),
    ],
)
def test_plugins_refuse(change: Change, said: str) -> None:
    assert said in " ".join(plugin_refusals(changed(change), OURS[PRESET]))


@pytest.mark.parametrize(
    ("runtime", "fields", "said"),
    [
        ("torchtune-llama3.2-1b", {}, None),
        ("torchtune-llama3.2-1b", {"numNodes": 2}, "must be 1 for llama3_2/1B"),
        ("torchtune-llama3.3-70b", {"numNodes": 2}, None),
        (
            "torchtune-llama3.3-70b",
            {"numNodes": 2, "args": ["model.lora_attn_modules=[q_proj]"]},
            "LoRA is not supported",
        ),
        ("torchtune-llama3.2-1b", {"args": ["output_dir=/tmp"]}, "is managed by the runtime"),
        ("torchtune-qwen2.5-1.5b", {"args": ["model.quantize_base=True"]}, "QLoRA is not supported"),
        ("torch-distributed", {}, "must have a supported pretrained model"),
    ],
)
def test_tune_is_admitted_for_some_models_alone(runtime: str, fields: dict[str, Any], said: str | None) -> None:
    spec = {"runtimeRef": {"name": runtime}, "trainer": {"command": ["tune", "run"], **fields}}
    told = plugin_refusals({"metadata": {"name": "job"}, "spec": spec}, REPLACEMENTS[runtime])
    assert told == [] if said is None else said in " ".join(told)
