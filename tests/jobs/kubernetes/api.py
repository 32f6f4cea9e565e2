"""kmock's API server, with what it lacks of a cluster with Kubeflow Trainer.

It admits what the gates of `admission.py` admit, sets what a server sets, filters by labels, keeps logs, and lets pods
come and go as JobSet would. Objects of a TrainJob go with it. How a pod goes, a test says, or its process does.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp.web
import kmock

from tests.jobs.kubernetes.admission import Object, plugin_refusals, refusals
from tests.jobs.kubernetes.jobset import ReplicatedJob, jobset

NAMESPACE = "science"
TRAIN_JOBS = "trainer.kubeflow.org/v1alpha1/trainjobs"
RUNTIMES = "trainer.kubeflow.org/v1alpha1/trainingruntimes"
CLUSTER_RUNTIMES = "trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
PODS, SECRETS, EVENTS = "v1/pods", "v1/secrets", "v1/events"
_START = datetime(2026, 1, 1, tzinfo=UTC)
PROGRESS, TOKEN = "/progress/", "of-the-pod"
_OVER = ("Succeeded", "Failed")


class Refused(kmock.KubernetesError):
    """The server does not take an object."""


class Api(kmock.KubernetesEmulator):
    """The API server.

    Attributes:
        logs: of each pod, time and text of its lines.
        said: is told when a pod has changed or its log has grown.
        failing: verb and kind -> what all are told who ask so.
        losing: verb and kind of what is done, but whose answers are lost.
        breaking: pods whose log breaks off after a line, once.
        run: runs a pod; None where tests say how pods go.
        end: ends a running pod.
    """

    def __init__(self) -> None:
        super().__init__()
        for kind in (TRAIN_JOBS, RUNTIMES, CLUSTER_RUNTIMES, PODS, SECRETS, EVENTS):
            self.resources[kind] = {}
        version = {"kubeflow_trainer_version": "v2.3.0"}
        self.objects["v1/configmaps", "kubeflow-system", "kubeflow-trainer-public"] = {"data": version}
        self.logs: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        self.said = asyncio.Condition()
        self.failing: dict[tuple[str, str], Refused] = {}
        self.breaking: set[str] = set()
        self.losing: set[tuple[str, str]] = set()
        self.run: Callable[[Object], None] | None = None
        self.end: Callable[[str], Awaitable[None]] | None = None
        self._ticks = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def time(self) -> str:
        self._ticks += 1
        return (_START + timedelta(seconds=self._ticks)).isoformat().replace("+00:00", "Z")

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        if request.url.path.startswith(PROGRESS):
            return self._note_progress(request)
        if request.resource is None or request.action is None:
            return await super()._handle(request)
        kind, verb = request.resource.plural, request.action.value.lower()
        if (verb, kind) in self.failing:
            raise self.failing[verb, kind]
        if request.subresource == "log":
            return await self._log(request)
        if verb == "create":
            self._admit(kind, request.data)
            request.data["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.time()}
            if request.namespace is not None:
                request.data["metadata"]["namespace"] = request.namespace
        if verb == "list" and request.params.get("labelSelector"):
            chosen = [it for it in self.all(kind, request.namespace) if selected(it, request.params["labelSelector"])]
            return aiohttp.web.json_response({"kind": "List", "metadata": {}, "items": chosen})
        answer = await super()._handle(request)
        if (verb, kind) in self.losing:
            assert request._raw_request is not None
            assert request._raw_request.transport is not None
            request._raw_request.transport.abort()
        if kind == "trainjobs" and verb == "create" and (seconds := request.data["spec"].get("activeDeadlineSeconds")):
            metadata = request.data["metadata"]
            late = (self.overrun, metadata["namespace"], metadata["name"], metadata["uid"])
            asyncio.get_running_loop().call_later(seconds, *late)
        if kind == "trainjobs" and verb in ("create", "update"):
            self.reconcile(request.namespace, request.name or request.data["metadata"]["name"])
        if kind == "trainjobs" and verb == "delete":
            self._gone(request.namespace, request.name)
        return answer

    def all(self, plural: str, namespace: str | None) -> list[Object]:
        found = []
        for (resource, place, _), thing in self.objects.items():
            if resource.plural == plural and place == namespace and not thing.deleted:
                found.append(json.loads(json.dumps(thing.raw)))
        return found

    def runtime_of(self, train_job: Object, namespace: str | None) -> Object | None:
        reference = train_job["spec"]["runtimeRef"]
        own = reference.get("kind") == "TrainingRuntime"
        there = self.all("trainingruntimes", namespace) if own else self.all("clustertrainingruntimes", None)
        return next((it for it in there if it["metadata"]["name"] == reference["name"]), None)

    def _admit(self, plural: str, thing: Object) -> None:
        if plural != "trainjobs":
            return
        runtime = self.runtime_of(thing, NAMESPACE)
        name = thing["spec"]["runtimeRef"].get("name")
        told = refusals(thing)
        if not told and runtime is None:
            told = [f"spec.runtimeRef: {name} does not exist"]
        if not told and runtime is not None:
            told = plugin_refusals(thing, runtime)
        if told:
            said = f'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: {"; ".join(told)}'
            raise Refused(403, "Forbidden", said, {})

    def _note_progress(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        """Trainer's status server: takes a pod's word that has the pod's token, if the CRD admits it."""
        job = self.objects[TRAIN_JOBS, NAMESPACE, request.url.path.removeprefix(PROGRESS)]
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized", "no such token", {})
        told = {**json.loads(json.dumps(job.raw)), "status": request.data}
        if against := refusals(told):
            raise Refused(422, "Invalid", "; ".join(against), {})
        job.patch({"status": request.data})
        return aiohttp.web.json_response({})

    # --- controllers --------------------------------------------------------------------------------------------------

    def reconcile(self, namespace: str | None, name: str) -> None:
        """What the controllers do when something has changed."""
        job = self.objects[TRAIN_JOBS, namespace, name]
        if job.deleted or (runtime := self.runtime_of(job.raw, namespace)) is None:
            return
        if finished(job.raw):
            return
        if job.raw["spec"].get("suspend"):
            self._end_pods(name, namespace)
            self.condition(job, "Suspended", "True", "Suspended", "TrainJob is suspended")
            return
        if any(it["type"] == "Suspended" for it in (job.raw.get("status") or {}).get("conditions") or []):
            self.condition(job, "Suspended", "False", "Resumed", "TrainJob is resumed")
        jobs = jobset(json.loads(json.dumps(job.raw)), runtime)
        phases = {it.name: self._phases(name, it, namespace) for it in jobs}
        for it in jobs:
            ready = all(phases[other] and set(phases[other]) == {"Succeeded"} for other in it.after)
            if ready and not phases[it.name]:
                self._create_pods(name, it, namespace)
        if any("Failed" in found for found in phases.values()):
            self.condition(job, "Failed", "True", "FailedJobs", "jobset failed due to one or more job failures")
            self._end_pods(name, namespace, only_running=True)
        elif all(found and set(found) == {"Succeeded"} for found in phases.values()):
            self.condition(job, "Complete", "True", "AllJobsCompleted", "jobset completed successfully")

    def condition(self, job: Any, kind: str, status: str, reason: str, message: str) -> None:
        made = {"type": kind, "status": status, "reason": reason, "message": message}
        others = [it for it in (job.raw.get("status") or {}).get("conditions") or [] if it["type"] != kind]
        job.patch({"status": {"conditions": [*others, made | {"lastTransitionTime": self.time()}]}})

    def pods_of(self, name: str, namespace: str | None) -> list[Object]:
        return [
            it
            for it in self.all("pods", namespace)
            if it["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] == name
        ]

    def _phases(self, name: str, job: ReplicatedJob, namespace: str | None) -> list[str]:
        newest: dict[str, str] = {}
        for pod in self.pods_of(name, namespace):
            labels = pod["metadata"]["labels"]
            if labels["jobset.sigs.k8s.io/replicatedjob-name"] == job.name:
                newest[labels["batch.kubernetes.io/job-completion-index"]] = pod["status"]["phase"]
        return list(newest.values())

    def _create_pods(self, name: str, job: ReplicatedJob, namespace: str | None) -> None:
        for index in range(job.count):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": job.name,
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            pod = f"{name}-{job.name}-0-{index}-{uuid.uuid4().hex[:5]}"
            metadata = {"name": pod, "namespace": namespace, "labels": labels, "uid": pod}
            made = {
                "metadata": metadata | {"creationTimestamp": self.time()},
                "spec": deepcopy(job.pod),
                "status": {"phase": "Pending"},
            }
            self.objects[PODS, namespace, pod] = made
            if self.run is not None:
                self.run(deepcopy(made))

    def _end_pods(self, name: str, namespace: str | None, *, only_running: bool = False) -> None:
        """Let pods of a job go; those that run are there until their processes are not."""
        for pod in self.pods_of(name, namespace):
            if pod["status"]["phase"] == "Running" and self.end is not None:
                task = asyncio.create_task(self._end_pod(pod["metadata"]["name"], namespace))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif not only_running:
                self.objects[PODS, namespace, pod["metadata"]["name"]].delete()

    async def _end_pod(self, name: str, namespace: str | None) -> None:
        assert self.end is not None
        await self.end(name)
        self.objects[PODS, namespace, name].delete()

    def overrun(self, namespace: str, name: str, uid: str) -> None:
        """A job has run longer than it may."""
        job = self.objects[TRAIN_JOBS, namespace, name]
        if not job.deleted and job.raw["metadata"]["uid"] == uid and not finished(job.raw):
            self.condition(job, "Failed", "True", "DeadlineExceeded", "TrainJob exceeded its active deadline")
            self._end_pods(name, namespace)

    async def set_pod(self, pod: Object, status: Object) -> None:
        """A pod has changed."""
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        if self.objects[PODS, NAMESPACE, name].deleted:
            return
        async with self.said:
            self.objects[PODS, NAMESPACE, name].patch({"status": status})
            self.said.notify_all()
        self.reconcile(NAMESPACE, labels["jobset.sigs.k8s.io/jobset-name"])

    async def say(self, pod: str, lines: list[str]) -> None:
        """A pod has written lines."""
        async with self.said:
            self.logs[pod] += [(self.time(), line) for line in lines]
            self.said.notify_all()

    async def set_state(self, pod: Object, state: Object) -> None:
        """A pod's container runs, or has ended."""
        ended = state.get("terminated")
        phase = "Running" if ended is None else "Failed" if ended["exitCode"] else "Succeeded"
        await self.set_pod(pod, {"phase": phase, "containerStatuses": [container_status(pod, state)]})

    def _gone(self, namespace: str | None, name: str | None) -> None:
        """What the garbage collector does."""
        self._end_pods(str(name), namespace)
        uid = self.objects[TRAIN_JOBS, namespace, str(name)].last.raw["metadata"]["uid"]
        for secret in self.all("secrets", namespace):
            if any(it["uid"] == uid for it in secret["metadata"].get("ownerReferences") or []):
                self.objects[SECRETS, namespace, secret["metadata"]["name"]].delete()

    # --- logs ---------------------------------------------------------------------------------------------------------

    async def _log(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        name, params = str(request.name), request.params
        pod = self.objects[PODS, request.namespace, name]
        if pod.raw["status"]["phase"] == "Pending":
            raise Refused(400, "BadRequest", f'container "{params["container"]}" is waiting to start', {})
        response = aiohttp.web.StreamResponse()
        assert request._raw_request is not None
        await response.prepare(request._raw_request)
        dated, sent = params.get("timestamps") == "true" or params.get("timestamps") == "True", 0
        if "tailLines" in params:
            sent = max(0, len(self.logs[name]) - int(params["tailLines"]))
        while True:
            async with self.said:
                while self._nothing_new(pod, name, sent, params):
                    await self.said.wait()
                lines = self.logs[name][sent:]
                over = not self._follows(params) or pod.deleted or pod.raw["status"]["phase"] in _OVER
            for time, line in lines:
                await response.write((f"{time} {line}\n" if dated else f"{line}\n").encode())
                if name in self.breaking:
                    self.breaking.remove(name)
                    request._raw_request.transport.abort()  # type: ignore[union-attr]
                    return response
            sent += len(lines)
            if over:
                await response.write_eof()
                return response

    @staticmethod
    def _follows(params: Any) -> bool:
        return str(params.get("follow")).lower() == "true"

    def _nothing_new(self, pod: Any, name: str, sent: int, params: Any) -> bool:
        running = not pod.deleted and pod.raw["status"]["phase"] == "Running"
        return self._follows(params) and running and len(self.logs[name]) == sent


def container_status(pod: Object, state: Object) -> Object:
    """Status of a pod's container, with all that a server never leaves out."""
    container = pod["spec"]["containers"][0]
    told = {"image": container.get("image", ""), "imageID": "", "ready": "running" in state, "restartCount": 0}
    return {"name": container["name"], **told, "state": state}


def selected(thing: Object, selector: str) -> bool:
    """Whether an object has the labels of a selector: `a`, `a=b`, `a in (b, c)`, with commas between."""
    labels = thing["metadata"].get("labels") or {}
    for part in re.split(r",(?![^(]*\))", selector):
        if match := re.fullmatch(r"(\S+) in \((.*)\)", part.strip()):
            if labels.get(match[1]) not in [word.strip() for word in match[2].split(",")]:
                return False
        elif "=" in part:
            key, _, value = part.partition("=")
            if labels.get(key.strip()) != value.strip():
                return False
        elif part.strip() not in labels:
            return False
    return True


def finished(job: Object) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(it["type"] in ("Complete", "Failed") and it["status"] == "True" for it in conditions)
