"""A cluster for tests, on loopback: each test says how the pods of its jobs go."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Coroutine, Iterator
from copy import deepcopy
from typing import Any, TypeVar

import kmock

from tests.jobs.kubernetes.admission import Object
from tests.jobs.kubernetes.api import (
    CLUSTER_RUNTIMES,
    EVENTS,
    NAMESPACE,
    PODS,
    RUNTIMES,
    TRAIN_JOBS,
    Api,
    Refused,
    container_status,
)
from tests.jobs.kubernetes.jobset import seen

_STEP = re.compile(r"node-(\d+)")

T = TypeVar("T")


class Cluster:
    """The cluster as a test drives it.

    Attributes:
        url: of its API server.
    """

    def __init__(self, api: Api, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.api, self.url, self._loop = api, url, loop

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the cluster do something."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def add_runtime(self, runtime: Object, namespace: str | None = None) -> None:
        kind = CLUSTER_RUNTIMES if namespace is None else RUNTIMES
        kept = {**runtime, "kind": "ClusterTrainingRuntime" if namespace is None else "TrainingRuntime"}

        async def add() -> None:
            self.api.objects[kind, namespace, runtime["metadata"]["name"]] = deepcopy(kept)

        self.wait_for(add())

    def remove_runtime(self, name: str, namespace: str | None = None) -> None:
        kind = CLUSTER_RUNTIMES if namespace is None else RUNTIMES

        async def remove() -> None:
            self.api.objects[kind, namespace, name].delete()

        self.wait_for(remove())

    def add_event(self, event: Object) -> None:
        async def add() -> None:
            self.api.objects[EVENTS, NAMESPACE, event["metadata"]["name"]] = event

        self.wait_for(add())

    def there(self, plural: str) -> list[Object]:
        """Objects of a kind, as they are."""

        async def look() -> list[Object]:
            return self.api.all(plural, NAMESPACE)

        return self.wait_for(look())

    def train_job(self, name: str) -> Object:
        (found,) = [it for it in self.there("trainjobs") if it["metadata"]["name"] == name]
        return found

    def pod(self, job: str, step: str) -> Object:
        """The newest pod of a step."""
        index = match[1] if (match := _STEP.fullmatch(step)) else "0"
        replicated = "node" if match else step
        found = [
            it
            for it in self.there("pods")
            if it["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] == job
            and it["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] == replicated
            and it["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == index
        ]
        return found[-1]

    def environment(self, job: str, step: str) -> dict[str, str]:
        """What the process of a step sees."""
        pod = self.pod(job, step)
        secrets = {it["metadata"]["name"]: it["stringData"] for it in self.there("secrets")}
        return seen(pod["spec"]["containers"][0], pod["metadata"]["labels"], secrets)

    def waits(self, job: str, step: str, why: str) -> None:
        """A pod finds no machine."""
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        self.wait_for(self.api.set_pod(self.pod(job, step), {"phase": "Pending", "conditions": [unscheduled]}))

    def cannot_pull(self, job: str, step: str, why: str) -> None:
        """A pod's image is not there."""
        pod = self.pod(job, step)
        state = {"waiting": {"reason": "ImagePullBackOff", "message": why}}
        told = {"phase": "Pending", "containerStatuses": [container_status(pod, state)]}
        self.wait_for(self.api.set_pod(pod, told))

    def create(self, train_job: Object) -> None:
        """Somebody else submits a TrainJob, which names a cluster's runtime."""
        kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
        metadata = {**train_job["metadata"], "namespace": NAMESPACE, "uid": "other"}

        async def create() -> None:
            made = kind | train_job | {"metadata": metadata | {"creationTimestamp": self.api.time()}}
            self.api.objects[TRAIN_JOBS, NAMESPACE, metadata["name"]] = made

        self.wait_for(create())

    def add_pod(self, job: str, replicated_job: str, index: int = 0) -> None:
        """A pod comes, in the place of an older one where there is one."""
        labels = {
            "jobset.sigs.k8s.io/jobset-name": job,
            "jobset.sigs.k8s.io/replicatedjob-name": replicated_job,
            "batch.kubernetes.io/job-completion-index": str(index),
        }

        async def add() -> None:
            time = self.api.time()
            name = f"{job}-{replicated_job}-0-{index}-{time[-4:-1]}"
            self.api.objects[PODS, NAMESPACE, name] = {
                "metadata": {"name": name, "labels": labels, "uid": name, "creationTimestamp": time},
                "spec": {"containers": [{"name": "node"}]},
                "status": {"phase": "Pending"},
            }

        self.wait_for(add())

    def begins(self, job: str, *steps: str) -> None:
        """Pods run."""
        for step in steps:
            self.wait_for(self.api.set_state(self.pod(job, step), {"running": {"startedAt": self._now()}}))

    def says(self, job: str, step: str, *lines: str) -> None:
        """A pod writes lines."""
        self.wait_for(self.api.say(self.pod(job, step)["metadata"]["name"], list(lines)))

    def ends(self, job: str, *steps: str, code: int = 0) -> None:
        """Pods end."""
        for step in steps:
            state = {"exitCode": code, "startedAt": self._now(), "finishedAt": self._now()}
            self.wait_for(self.api.set_state(self.pod(job, step), {"terminated": state}))

    def completes(self, job: str, *, nodes: int = 1) -> None:
        """Pods of a job run through."""
        before, after = ("dataset-initializer", "model-initializer"), ("exporter",) if nodes else ()
        for step in (*before, *(f"node-{number}" for number in range(nodes)), *after):
            with contextlib.suppress(IndexError):  # no such step in its runtime
                self.ends(job, step)

    def says_of_progress(self, job: str, status: Object) -> None:
        """The status server has taken a pod's word."""

        async def note() -> None:
            self.api.objects[TRAIN_JOBS, NAMESPACE, job].patch({"status": {"trainerStatus": status}})

        self.wait_for(note())

    def fails(self, verb: str, plural: str, status: int | None, message: str = "") -> None:
        """The API server answers with an error to all that ask so; no longer, with None."""

        async def fail() -> None:
            self.api.failing.pop((verb, plural), None)
            if status is not None:
                self.api.failing[verb, plural] = Refused(status, "Error", message, {})

        self.wait_for(fail())

    def loses(self, verb: str, plural: str, lost: bool) -> None:
        """Whether answers to all that ask so are lost."""

        async def lose() -> None:
            (self.api.losing.add if lost else self.api.losing.discard)((verb, plural))

        self.wait_for(lose())

    def overruns(self, job: str) -> None:
        """A job has run longer than it may."""
        uid = self.train_job(job)["metadata"]["uid"]

        async def overrun() -> None:
            self.api.overrun(NAMESPACE, job, uid)

        self.wait_for(overrun())

    def breaks_after_a_line(self, job: str, step: str) -> None:
        """The next connection that follows a pod's log breaks."""
        name = self.pod(job, step)["metadata"]["name"]

        async def note() -> None:
            self.api.breaking.add(name)

        self.wait_for(note())

    def _now(self) -> str:
        async def now() -> str:
            return self.api.time()

        return self.wait_for(now())


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster on loopback, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Api, kmock.Server]:
        api = Api()
        server = kmock.Server(api)
        await api.__aenter__()
        await server.__aenter__()
        return api, server

    async def stop(api: Api, server: kmock.Server) -> None:
        await server.__aexit__(None, None, None)
        await api.__aexit__(None, None, None)

    try:
        api, server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield Cluster(api, str(server.url).rstrip("/"), loop)
        finally:
            asyncio.run_coroutine_threadsafe(stop(api, server), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
