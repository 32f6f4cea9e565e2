"""The backend against a cluster: what it reads of a job's course, what it leaves behind, what it says of failures."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from luthier.errors import UserError
from luthier.jobs import TrainerClient
from luthier.jobs.backends.kubernetes import KubernetesBackend
from luthier.jobs.options import KubernetesBackendConfig
from luthier.jobs.spec import JobSpec, Transfer
from luthier.jobs.types import RuntimeKind, TrainerStatus
from tests.jobs.kubernetes.api import NAMESPACE
from tests.jobs.kubernetes.cluster import Cluster
from tests.jobs.kubernetes.test_manifests import OURS, UPSTREAM

PRESET = "luthier-qwen2.5-0.5b"
RUN = {"model": "model", "data": {"train": [{"path": "dataset"}]}, "output": "output"}
ROWS = Transfer({"STORAGE_URI": "hf://a/b"}, {"ACCESS_TOKEN": "hf_hidden"})


def submit(backend: KubernetesBackend, name: str, runtime: str = "torch-distributed", **more: Any) -> None:
    backend.submit(JobSpec(name, runtime, "torch", **({"command": ("true",)} | more)))


def train(backend: KubernetesBackend, name: str, **more: Any) -> None:
    backend.submit(JobSpec(name, PRESET, "luthier", engine="luthier", config=RUN, dataset=ROWS, **more))


def refused(work: Any) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- runtimes ---------------------------------------------------------------------------------------------------------


def test_all_runtimes_are_listed_by_name(backend: KubernetesBackend) -> None:
    runtimes = backend.list_runtimes()
    names = [runtime.name for runtime in runtimes]
    assert names == sorted([*UPSTREAM, "luthier", PRESET, "luthier-llama3.1-70b"])
    assert {runtime.kind for runtime in runtimes} == {RuntimeKind.CLUSTER_TRAINING_RUNTIME}


def test_a_namespaces_own_runtime_wins(backend: KubernetesBackend, world: Cluster) -> None:
    own = yaml.safe_load(yaml.safe_dump(OURS["luthier-qwen3-0.6b"]))
    world.add_runtime(own)
    own["spec"]["mlPolicy"]["numNodes"] = 5
    world.add_runtime(own, NAMESPACE)
    (found,) = [runtime for runtime in backend.list_runtimes() if runtime.name == "luthier-qwen3-0.6b"]
    assert found.trainer is not None
    assert (found.kind, found.trainer.num_nodes) == (RuntimeKind.TRAINING_RUNTIME, 5)
    backend.submit(JobSpec("own", "luthier-qwen3-0.6b", "luthier", engine="luthier", config=RUN))
    assert world.train_job("own")["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    assert backend.get_job("own").runtime == found
    world.remove_runtime("luthier-qwen3-0.6b")
    world.remove_runtime("luthier-qwen3-0.6b", NAMESPACE)


# --- the course of a job ----------------------------------------------------------------------------------------------


def test_steps_come_one_after_the_other(backend: KubernetesBackend, world: Cluster) -> None:
    train(backend, "course", exporter=Transfer({"STORAGE_URI": "hf://me/it", "EXPORT_FORM": "merged"}), num_nodes=2)

    def now() -> tuple[str, dict[str, str | None]]:
        job = backend.get_job("course")
        return job.status, {step.name: step.status for step in job.steps}

    steps = ["dataset-initializer", "node-0", "node-1", "exporter"]  # no model is asked for: none is fetched
    assert now() == ("Created", dict.fromkeys(steps, "Created"))
    world.begins("course", "dataset-initializer", "model-initializer")
    assert now() == ("Running", dict.fromkeys(steps, "Created") | {"dataset-initializer": "Running"})
    world.ends("course", "dataset-initializer", "model-initializer")
    world.begins("course", "node-0", "node-1")
    assert now()[1] == {
        "dataset-initializer": "Complete",
        "node-0": "Running",
        "node-1": "Running",
        "exporter": "Created",
    }
    world.ends("course", "node-0", "node-1")
    assert now()[0] == "Running"
    world.ends("course", "exporter")
    assert now() == ("Complete", dict.fromkeys(steps, "Complete"))
    job = backend.get_job("course")
    node = job.steps[1]
    assert (node.device, node.device_count, node.exit_code) == ("gpu", "1", 0)
    assert node.started is not None
    assert node.ended is not None
    assert job.creation_timestamp < node.started < node.ended
    assert node.pod_name.startswith("course-node-0-0-")
    assert (job.message, job.num_nodes, job.runtime.pretrained_model) == ("", 2, "Qwen/Qwen2.5-0.5B-Instruct")


def test_progress_is_what_the_pod_has_told_kubeflow(backend: KubernetesBackend, world: Cluster) -> None:
    train(backend, "progress")
    assert backend.get_job("progress").trainer_status is None
    metrics = [{"name": "loss", "value": "1.5"}, {"name": "phase", "value": "warm"}]
    told = {"progressPercentage": 40, "estimatedRemainingSeconds": 0, "metrics": metrics}
    world.says_of_progress("progress", told | {"lastUpdatedTime": "2026-01-01T00:00:00.123456789Z"})
    status = backend.get_job("progress").trainer_status
    assert isinstance(status, TrainerStatus)
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (40, 0)
    assert status.metrics == {"loss": 1.5}
    assert status.last_updated_time is not None
    assert status.last_updated_time.isoformat() == "2026-01-01T00:00:00.123456+00:00"


def test_a_failure_says_which_step_and_its_last_lines(backend: KubernetesBackend, world: Cluster) -> None:
    train(backend, "fails", num_nodes=2)
    world.completes("fails", nodes=0)
    world.begins("fails", "node-0", "node-1")
    world.says("fails", "node-1", *(f"line {number}" for number in range(30)), "ValueError: no")
    world.ends("fails", "node-1", code=1)
    job = backend.get_job("fails")
    assert job.status == "Failed"
    assert job.message.splitlines() == [
        "node-1 left with exit code 1:",
        *(f"line {number}" for number in range(19, 30)),
        "ValueError: no",
    ]
    (listed,) = [it for it in backend.list_jobs() if it.name == "fails"]
    assert listed.message == "node-1 left with exit code 1"


def test_a_deadline_is_told_as_everywhere(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "late", active_deadline_seconds=600)
    world.begins("late", "node-0")
    world.overruns("late")
    job = backend.get_job("late")
    assert (job.status, job.message) == ("Failed", "ran longer than its active_deadline_seconds of 600")


def test_a_job_says_what_it_waits_for(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "waits")
    assert backend.get_job("waits").message == ""
    world.waits("waits", "node-0", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    why = "waits for the cluster: node-0: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert (backend.get_job("waits").status, backend.get_job("waits").message) == ("Created", why)
    world.cannot_pull("waits", "node-0", "manifest unknown")
    assert backend.get_job("waits").message == "waits for the cluster: node-0: ImagePullBackOff: manifest unknown"


def test_a_job_is_suspended_and_goes_on(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "pauses")
    world.begins("pauses", "node-0")
    backend.suspend_job("pauses")
    job = backend.get_job("pauses")
    assert (job.status, job.message) == ("Suspended", "resume_job() lets it go on")
    assert [step.status for step in job.steps] == ["Suspended"]
    backend.resume_job("pauses")
    assert backend.get_job("pauses").status == "Created"
    world.begins("pauses", "node-0")
    assert backend.get_job("pauses").status == "Running"
    world.ends("pauses", "node-0")
    assert refused(lambda: backend.suspend_job("pauses")).startswith("pauses: has ended (Complete)")
    assert refused(lambda: backend.resume_job("none")).startswith("none: there is no job of this name")


def test_a_job_outlives_its_runtime(backend: KubernetesBackend, world: Cluster) -> None:
    world.add_runtime(OURS["luthier-mistral-7b"])
    spec = JobSpec("orphan", "luthier-mistral-7b", "luthier", engine="luthier", config=RUN, dataset=ROWS)
    backend.submit(spec)
    world.begins("orphan", "dataset-initializer")
    world.remove_runtime("luthier-mistral-7b")
    job = backend.get_job("orphan")
    assert (job.status, job.runtime.name, job.runtime.trainer) == ("Running", "luthier-mistral-7b", None)
    assert [step.name for step in job.steps] == ["dataset-initializer", "node-0"]
    assert "orphan" in [it.name for it in backend.list_jobs()]


def test_what_others_have_submitted_is_read(backend: KubernetesBackend, world: Cluster) -> None:
    """By kubectl or another SDK: a launcher is the first node, a runtime's own initializers are steps."""
    world.create({"metadata": {"name": "mpi"}, "spec": {"runtimeRef": {"name": "deepspeed-distributed"}}})
    world.create({"metadata": {"name": "bare"}, "spec": {"runtimeRef": {"name": PRESET}}})
    world.add_pod("mpi", "launcher")
    world.add_pod("mpi", "node")
    assert [step.name for step in backend.get_job("mpi").steps] == ["node-0", "node-1"]
    steps = [step.name for step in backend.get_job("bare").steps]
    assert steps == ["dataset-initializer", "model-initializer", "node-0"]


# --- logs and events --------------------------------------------------------------------------------------------------


def test_a_pod_that_waits_is_waited_for_and_said(
    backend: KubernetesBackend, world: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    submit(backend, "logs")
    world.waits("logs", "node-0", "no machine")
    assert list(backend.get_job_logs("logs", "node-0", follow=False)) == []
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    listener = Listener()
    logging.getLogger("luthier.jobs.backends.kubernetes").addHandler(listener)
    lines: list[str] = []
    reader = threading.Thread(
        target=lambda: lines.extend(backend.get_job_logs("logs", "node-0", follow=True)), daemon=True
    )
    try:
        reader.start()
        assert said.wait(30)
    finally:
        logging.getLogger("luthier.jobs.backends.kubernetes").removeHandler(listener)
    world.begins("logs", "node-0")
    world.says("logs", "node-0", "one", "two")
    world.ends("logs", "node-0")
    reader.join(30)
    assert lines == ["one", "two"]
    assert caplog.messages == ["node-0 of job logs waits: no machine"]


def test_lines_come_at_once_and_a_broken_connection_loses_none(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "streams")
    world.begins("streams", "node-0")
    world.says("streams", "node-0", "one", "two", "two")
    world.breaks_after_a_line("streams", "node-0")
    lines = backend.get_job_logs("streams", "node-0", follow=True)
    assert [next(lines), next(lines), next(lines)] == ["one", "two", "two"]
    world.says("streams", "node-0", "ü")
    assert next(lines) == "ü"
    world.ends("streams", "node-0")
    assert list(lines) == []
    assert list(backend.get_job_logs("streams", "node-0", follow=False)) == ["one", "two", "two", "ü"]


def test_the_newest_pod_of_a_step_is_the_one_that_counts(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "retried")
    world.begins("retried", "node-0")
    world.says("retried", "node-0", "first try")
    world.add_pod("retried", "node")
    assert backend.get_job("retried").steps[0].status == "Created"
    world.begins("retried", "node-0")
    world.says("retried", "node-0", "second try")
    assert list(backend.get_job_logs("retried", "node-0", follow=False)) == ["second try"]


def test_events_are_the_jobs_own(backend: KubernetesBackend, world: Cluster) -> None:
    submit(backend, "events")
    submit(backend, "events-2")
    world.begins("events", "node-0")
    pod = world.pod("events", "node-0")["metadata"]["name"]
    other = world.pod("events-2", "node-0")["metadata"]["name"]
    for number, (kind, name) in enumerate(
        [("Pod", pod), ("Pod", other), ("JobSet", "events"), ("Job", "events-node-0"), ("Pod", "events-node-0-0-gone1")]
    ):
        world.add_event(
            {
                "metadata": {"name": f"events-{number}", "creationTimestamp": "2026-02-01T00:00:00Z"},
                "involvedObject": {"kind": kind, "name": name},
                "reason": "Scheduled",
                "message": f"about {name}",
                "eventTime": f"2026-02-01T00:00:0{number}.000000Z",
            }
        )
    told = backend.get_job_events("events")
    assert [(event.involved_object_kind, event.involved_object_name, event.reason) for event in told] == [
        ("TrainJob", "events", "Submitted"),
        ("TrainJob", "events", "Running"),
        ("Pod", pod, "Started"),
        ("Pod", pod, "Scheduled"),
        ("JobSet", "events", "Scheduled"),
        ("Job", "events-node-0", "Scheduled"),
        ("Pod", "events-node-0-0-gone1", "Scheduled"),
    ]


# --- what is left behind ----------------------------------------------------------------------------------------------


def secrets_of(world: Cluster, job: str) -> list[str]:
    return [name for it in world.there("secrets") if (name := it["metadata"]["name"]).startswith(f"{job}-")]


def test_secrets_go_with_their_job(backend: KubernetesBackend, world: Cluster) -> None:
    train(backend, "hidden", env={"HF_TOKEN": "hf_hidden"})
    assert len(secrets_of(world, "hidden")) == 2
    uid = world.train_job("hidden")["metadata"]["uid"]
    for secret in world.there("secrets"):
        if secret["metadata"]["name"].startswith("hidden-"):
            (owner,) = secret["metadata"]["ownerReferences"]
            assert owner == {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "name": "hidden",
                "uid": uid,
            }
    assert world.environment("hidden", "dataset-initializer")["ACCESS_TOKEN"] == "hf_hidden"
    backend.delete_job("hidden")
    assert secrets_of(world, "hidden") == []
    assert refused(lambda: backend.get_job("hidden")).startswith("hidden: there is no job of this name")


@pytest.mark.parametrize(
    ("verb", "kind", "status", "message", "said"),
    [
        ("create", "trainjobs", 500, "etcd is full", "answers with an error of its own (500: etcd is full)"),
        ("create", "trainjobs", 404, 'namespaces "x" not found', 'is refused by the cluster: namespaces "x" not found'),
        ("create", "trainjobs", 422, "spec is wrong", "left: is refused by the cluster: spec is wrong"),
        ("update", "secrets", 403, "secrets is forbidden", "is not allowed here (secrets is forbidden); ask whoever"),
        ("create", "secrets", 403, "secrets is forbidden", "is not allowed here (secrets is forbidden); ask whoever"),
    ],
)
def test_nothing_is_left_of_a_job_that_was_not_taken(
    backend: KubernetesBackend, world: Cluster, verb: str, kind: str, status: int, message: str, said: str
) -> None:
    world.fails(verb, kind, status, message)
    try:
        assert said in refused(lambda: train(backend, "left", env={"HF_TOKEN": "hf_hidden"}))
    finally:
        world.fails(verb, kind, None)
    assert secrets_of(world, "left") == []
    assert "left" not in [it.name for it in backend.list_jobs()]


def test_nothing_is_left_of_a_job_whose_answer_was_lost(backend: KubernetesBackend, world: Cluster) -> None:
    world.loses("create", "trainjobs", True)
    try:
        assert "cannot be reached" in refused(lambda: train(backend, "lost"))
    finally:
        world.loses("create", "trainjobs", False)
    assert secrets_of(world, "lost") == []
    assert "lost" not in [it.name for it in backend.list_jobs()]


def test_a_name_is_taken_once_though_two_ask_at_once(backend: KubernetesBackend, world: Cluster) -> None:
    answers: list[str] = []
    ready = threading.Barrier(4)

    def ask() -> None:
        ready.wait()
        try:
            train(backend, "once")
            answers.append("taken")
        except UserError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusal = "once: there is a job of this name already; delete it, or choose another name"
    assert sorted(answers) == sorted([*3 * [refusal], "taken"])
    assert len(secrets_of(world, "once")) == 1


def test_what_the_cluster_refuses_is_said_in_its_words(backend: KubernetesBackend) -> None:
    said = refused(lambda: submit(backend, "bad", env={}, labels={}, command=("true",), nproc_per_node=0))
    assert said.startswith('bad: is refused by the cluster: admission webhook "validator.trainjob')
    assert "numProcPerNode must be greater than or equal to 1" in said


# --- clusters that do not answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "does not know this user; log in again, or check the kubeconfig"),
        (403, "its jobs: is not allowed here (trainjobs is forbidden); ask whoever runs the cluster for that right"),
        (404, "has no Kubeflow Trainer (its jobs cannot be listed); install it: https://www.kubeflow.org/"),
        (503, "answers with an error of its own (503: trainjobs is forbidden)"),
    ],
)
def test_a_cluster_that_refuses(backend: KubernetesBackend, world: Cluster, status: int, said: str) -> None:
    world.fails("list", "trainjobs", status, "trainjobs is forbidden")
    try:
        assert said in refused(backend.list_jobs)
    finally:
        world.fails("list", "trainjobs", None)


def test_a_cluster_that_is_not_there() -> None:
    settings = kubernetes.client.Configuration(host="http://127.0.0.1:9")
    settings.retries = False
    backend = KubernetesBackend(KubernetesBackendConfig(namespace="a", client_configuration=settings))
    said = refused(backend.list_jobs)
    assert said.startswith("http://127.0.0.1:9: cannot be reached (")
    assert said.endswith("; check the kubeconfig and the network")


def test_no_cluster_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = KubernetesBackendConfig(config_file=str(tmp_path / "none"))
    said = refused(lambda: TrainerClient(config).list_jobs())
    assert said.startswith("backend_config: no cluster is configured (")
    assert said.endswith("; name a kubeconfig in config_file or KUBECONFIG")


def test_a_kubeconfig_says_where_and_which_namespace(world: Cluster, tmp_path: Path) -> None:
    names = {"one": NAMESPACE, "other": "empty"}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": world.url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [
            {"name": name, "context": {"cluster": "here", "user": "me", "namespace": place}}
            for name, place in names.items()
        ],
        "current-context": "one",
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(kubeconfig))
    backend = KubernetesBackend(KubernetesBackendConfig(config_file=str(path)))
    submit(backend, "configured")
    assert "configured" in [job.name for job in backend.list_jobs()]
    other = KubernetesBackend(KubernetesBackendConfig(config_file=str(path), context="other"))
    assert other.list_jobs() == []
    chosen = KubernetesBackend(KubernetesBackendConfig(NAMESPACE, str(path), "other"))
    assert "configured" in [job.name for job in chosen.list_jobs()]


def test_the_client_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    said = refused(lambda: KubernetesBackend(KubernetesBackendConfig()))
    assert said == ("backend_config: needs the package kubernetes; install it with: pip install 'luthier[kubernetes]'")


def test_objects_are_shown_without_their_secrets(backend: KubernetesBackend) -> None:
    spec = JobSpec("shown", PRESET, "luthier", engine="luthier", config=RUN, dataset=ROWS)
    secret, train_job = backend.as_object(spec)
    assert (secret["kind"], secret["stringData"]) == ("Secret", {"ACCESS_TOKEN": "(secret)"})
    assert (train_job["kind"], train_job["metadata"]["name"]) == ("TrainJob", "shown")
    assert "shown" not in [job.name for job in backend.list_jobs()]
