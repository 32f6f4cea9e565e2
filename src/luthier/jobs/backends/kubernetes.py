"""Jobs as TrainJobs of Kubeflow Trainer. All of their state is the cluster's."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from luthier.errors import UserError
from luthier.jobs import messages
from luthier.jobs.backends.kubernetes_cluster import Broken, Cluster, Missing, Taken
from luthier.jobs.backends.kubernetes_names import Object, replicated_jobs
from luthier.jobs.backends.kubernetes_objects import is_of, objects, secret_names, shown
from luthier.jobs.backends.kubernetes_runtimes import runtime_of
from luthier.jobs.backends.kubernetes_status import (
    FINAL,
    by_job,
    conditions,
    container_of,
    first_failed,
    has_begun,
    pods_of_steps,
    ran,
    status_of,
    step_names,
    train_job_of,
    when,
    why_waiting,
)
from luthier.jobs.options import KubernetesBackendConfig
from luthier.jobs.spec import JobSpec, node_step
from luthier.jobs.types import COMPLETE, FAILED, RUNNING, Event, Runtime, TrainJob

_log = logging.getLogger(__name__)

_PAUSE = 0.5
_GONE_SECONDS = 600.0
_PACKAGES_SECONDS = 600.0
_LAST_LINES = 12

_SMALL: dict[str, Any] = {"resources_per_node": {"cpu": 1, "gpu": 0}}
_PACKAGES = """
import importlib.metadata, json
print(json.dumps({it.metadata["Name"]: it.version for it in importlib.metadata.distributions()}))
"""


class KubernetesBackend:
    """Runs jobs on a cluster.

    Args:
        config: which cluster and namespace.

    Raises:
        UserError: no cluster is configured.
    """

    def __init__(self, config: KubernetesBackendConfig | None = None) -> None:
        self._cluster = Cluster(config or KubernetesBackendConfig())

    def list_runtimes(self) -> list[Runtime]:
        """All runtimes, by name."""
        return [runtime_of(found) for found in self._cluster.runtimes()]

    def get_runtime_packages(self, runtime: Runtime) -> dict[str, str]:
        """Installed Python packages of a runtime -> their versions, as a small job finds them.

        Raises:
            UserError: that job fails, or takes longer than ten minutes.
        """
        job = f"packages-{secrets.token_hex(4)}"
        framework = str(runtime.trainer.framework) if runtime.trainer is not None else ""
        self.submit(JobSpec(job, runtime.name, framework, 1, 1, command=("python", "-c", _PACKAGES), **_SMALL))
        try:
            end = time.monotonic() + _PACKAGES_SECONDS
            while (now := self.get_job(job)).status not in FINAL:
                if time.monotonic() > end:
                    raise UserError(f"its packages are not known yet: {now.message}", where=runtime.name)
                time.sleep(_PAUSE)
            if now.status == FAILED:
                raise UserError(f"its packages cannot be listed: {now.message}", where=runtime.name)
            lines = list(self.get_job_logs(job, node_step(0), follow=False))
        finally:
            self.delete_job(job)
        found: dict[str, str] = json.loads(lines[-1])
        return dict(sorted(found.items(), key=lambda item: item[0].lower()))

    def submit(self, spec: JobSpec) -> None:
        """Take a job. It is durable when this returns.

        Raises:
            UserError: a job of that name is there already, its runtime is unknown or has no place for what it asks, or
                the cluster refuses it.
        """
        *hidden, train_job = objects(spec, self._runtime(spec.runtime), secrets.token_hex(4))
        with contextlib.suppress(Missing):
            self._cluster.train_job(spec.name)
            raise messages.duplicate(spec.name)
        try:
            self._make(hidden, train_job)
        except Taken:
            raise messages.duplicate(spec.name) from None

    def list_jobs(self) -> list[TrainJob]:
        """All jobs, the oldest first."""
        runtimes = {(it["kind"], it["metadata"]["name"]): it for it in self._cluster.runtimes()}
        pods = by_job(self._cluster.pods())
        jobs = [
            train_job_of(found, runtimes.get(_reference(found)), pods.get(found["metadata"]["name"], []))
            for found in self._cluster.train_jobs()
        ]
        return sorted(jobs, key=lambda job: (job.creation_timestamp, job.name))

    def get_job(self, name: str) -> TrainJob:
        """One job as it is now.

        Raises:
            UserError: there is none of that name.
        """
        found = self._find(name)
        runtime, pods = self._runtime_of(found), self._cluster.pods(name)
        job = train_job_of(found, runtime, pods)
        failed = first_failed(job.steps) if job.status == FAILED else None
        if failed is not None and failed.name in job.message:
            pod = pods_of_steps(pods, runtime)[failed.name]
            text = self._cluster.log(failed.pod_name, container_of(pod), last=_LAST_LINES)
            lines = [line.rstrip() for line in text if line.strip()]
            job.message = "\n".join([f"{job.message}:", *lines] if lines else [job.message])
        return job

    def get_job_logs(self, name: str, step: str, *, follow: bool) -> Iterator[str]:
        """Lines of a step's log, without line ends; with `follow` each as soon as it is written, until the step is done
        or the job has ended. What a pod that has not begun waits for is said as a warning.

        Raises:
            UserError: there is no such job, or the job has no such step.
        """
        found = self._find(name)
        runtime = self._runtime_of(found)
        pods = pods_of_steps(self._cluster.pods(name), runtime)
        steps = step_names(found, runtime, pods)
        if step not in steps:
            raise messages.unknown_step(name, step, steps)
        if follow:
            return self._follow(name, step, runtime)
        pod = pods.get(step)
        if pod is None or not has_begun(pod):
            return iter(())
        return iter(self._cluster.log(pod["metadata"]["name"], container_of(pod)))

    def get_job_events(self, name: str) -> list[Event]:
        """What has happened to a job, the oldest first: what the cluster tells of it and its pods, and what its
        conditions say. A cluster forgets its events after an hour."""
        found = self._find(name)
        runtime = self._runtime_of(found)
        pods = self._cluster.pods(name)
        events = _told_by_job(found, runtime, pods)
        names = {name, *(pod["metadata"]["name"] for pod in pods)}
        jobs = [re.escape(f"{name}-{job}") for job in (replicated_jobs(runtime) if runtime is not None else ())]
        theirs = re.compile(rf"({'|'.join(jobs)})-\d+(-\d+-\w+)?")  # Jobs, and pods that are gone
        for event in self._cluster.events():
            about = event.get("involvedObject") or {}
            if about.get("name") in names or theirs.fullmatch(about.get("name") or ""):
                time = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
                time = time or event["metadata"].get("creationTimestamp")
                told = (event.get("message"), event.get("reason"))
                events.append(_event(about.get("kind", ""), about["name"], *told, time))
        return sorted(events, key=lambda event: event.event_time)

    def delete_job(self, name: str) -> None:
        """End a job's pods, wait until they are gone, and forget it with its Secrets.

        Raises:
            UserError: there is none of that name, or its pods do not end within ten minutes.
        """
        found = self._find(name)
        try:
            self._cluster.delete_train_job(name)
        except Missing:
            raise messages.unknown_job(name) from None
        for secret in secret_names(found):
            self._cluster.delete_secret(secret)
        end = time.monotonic() + _GONE_SECONDS
        while left := self._left(found):
            if time.monotonic() > end:
                raise UserError(
                    f"is being deleted, and {', '.join(left)} still there after {_GONE_SECONDS:.0f} seconds",
                    where=name,
                    remedy="see why with kubectl describe",
                )
            time.sleep(_PAUSE)

    def suspend_job(self, name: str) -> None:
        """Let a job stop: its pods are asked to, so that a run saves a checkpoint first.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self._suspend(name, True)

    def resume_job(self, name: str) -> None:
        """Let a suspended job go on.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self._suspend(name, False)

    def as_object(self, spec: JobSpec) -> list[Object]:
        """The objects that `submit` would make, the TrainJob last, with the values of Secrets left out."""
        return shown(objects(spec, self._runtime(spec.runtime), "TOKEN"))

    # --- looking ------------------------------------------------------------------------------------------------------

    def _runtime(self, name: str) -> Object:
        try:
            return self._cluster.runtime(name)
        except Missing:
            from luthier.jobs.runtimes import find

            return self._cluster.runtime(find(name, self.list_runtimes()).name)

    def _runtime_of(self, found: Object) -> Object | None:
        kind, name = _reference(found)
        try:
            return self._cluster.runtime(name, kind)
        except Missing:
            return None  # its jobs outlive a runtime

    def _find(self, name: str) -> Object:
        try:
            return self._cluster.train_job(name)
        except Missing:
            raise messages.unknown_job(name) from None

    def _make(self, hidden: Sequence[Object], train_job: Object) -> None:
        """Make a job and its secrets, all of them or none."""
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._take_back, train_job)
            for secret in hidden:
                self._cluster.create_secret(secret)
            made = self._cluster.create_train_job(train_job)
            for secret in hidden:
                self._cluster.own_secret(secret["metadata"]["name"], made)
            unless_made.pop_all()

    def _take_back(self, train_job: Object) -> None:
        """Delete what a submission may have made before it failed: a lost answer says nothing of what was done."""
        name = train_job["metadata"]["name"]
        with contextlib.suppress(UserError, Missing):
            if is_of(self._cluster.train_job(name), train_job):
                self._cluster.delete_train_job(name)
        for secret in secret_names(train_job):
            with contextlib.suppress(UserError):
                self._cluster.delete_secret(secret)

    def _left(self, deleted: Object) -> list[str]:
        """What is still there of a job that has been deleted."""
        name, uid = deleted["metadata"]["name"], deleted["metadata"].get("uid")
        with contextlib.suppress(Missing):
            now = self._cluster.train_job(name)
            if now["metadata"].get("uid") == uid:
                return [f"TrainJob {name}"]
            return []  # another of its name has come
        return [f"pod {pod['metadata']['name']}" for pod in self._cluster.pods(name)]

    def _suspend(self, name: str, suspend: bool) -> None:
        found = self._find(name)
        if (status := status_of(found, [])) in FINAL:
            raise messages.has_ended(name, status)
        try:
            self._cluster.suspend_train_job(name, suspend)
        except Missing:
            raise messages.unknown_job(name) from None

    def _follow(self, name: str, step: str, runtime: Object | None) -> Iterator[str]:
        last: dict[str, str] = {}
        read: set[str] = set()
        said = ""
        while True:
            # Asked before reading: what is written until the job has ended is read after it has.
            try:
                ended = status_of(self._cluster.train_job(name), []) in FINAL
            except Missing:
                return
            pod = pods_of_steps(self._cluster.pods(name), runtime).get(step)
            key = (pod["metadata"].get("uid") or pod["metadata"]["name"]) if pod is not None else ""
            if pod is not None and has_begun(pod) and key not in read:
                phase = (pod.get("status") or {}).get("phase")
                # A connection may break while the pod goes on; whoever comes back reads from the first line again.
                with contextlib.suppress(Broken):
                    for written, text in self._cluster.follow_log(pod["metadata"]["name"], container_of(pod)):
                        if written > last.get(key, ""):
                            yield text
                            last[key] = written
                    if phase in ("Succeeded", "Failed"):
                        read.add(key)
                        ended |= phase == "Succeeded"
                ended &= key in read
            elif pod is not None and (reason := why_waiting(pod)) not in ("", said):
                _log.warning("%s of job %s waits: %s", step, name, reason)
                said = reason
            if ended:
                return
            time.sleep(_PAUSE)


def _reference(train_job: Object) -> tuple[str, str]:
    reference = train_job["spec"]["runtimeRef"]
    return reference.get("kind") or "ClusterTrainingRuntime", reference["name"]


def _told_by_job(found: Object, runtime: Object | None, pods: list[Object]) -> list[Event]:
    """What a TrainJob and its pods tell of themselves."""
    name, of_steps = found["metadata"]["name"], pods_of_steps(pods, runtime)
    events = [_event("TrainJob", name, f"{name} has been taken", "Submitted", found["metadata"]["creationTimestamp"])]
    if began := [time for pod in pods if (time := ran(pod)[0]) is not None]:
        events.append(_event("TrainJob", name, "its first pod runs", RUNNING, min(began)))
    for step in step_names(found, runtime, of_steps):
        if (pod := of_steps.get(step)) is None:
            continue
        began_at, ended_at, code = ran(pod)
        if began_at is not None:
            events.append(_event("Pod", pod["metadata"]["name"], f"{step} runs", "Started", began_at))
        if ended_at is not None:
            reason = FAILED if code else COMPLETE
            events.append(_event("Pod", pod["metadata"]["name"], f"exit code {code}", reason, ended_at))
    for it in conditions(found):
        if it["status"] == "True":
            events.append(_event("TrainJob", name, it.get("message"), it["type"], it.get("lastTransitionTime")))
    return events


def _event(kind: str, name: str, message: Any, reason: Any, time: str | None) -> Event:
    return Event(kind, name, message or "", reason or "", when(time) or datetime.fromtimestamp(0, UTC))
