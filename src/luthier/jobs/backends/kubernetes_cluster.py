"""Talks to a cluster, through the official Python client; what the cluster answers stays plain data.

What goes wrong is a `UserError` of one sentence, in the cluster's own words where it has any.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luthier.errors import UserError, first_line
from luthier.jobs.backends.kubernetes_names import (
    CLUSTER_RUNTIMES,
    GROUP,
    JOBSET,
    RUNTIMES,
    TRAIN_JOBS,
    VERSION,
    Object,
    labels,
)
from luthier.jobs.options import KubernetesBackendConfig

if TYPE_CHECKING:
    from kubernetes.client import ApiException

_OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = (10, 60)
"""For a connection, and between two bytes of an answer."""


class Missing(Exception):
    """The cluster has no such object."""


class Taken(Exception):
    """The cluster has an object of that name."""


class Broken(Exception):
    """A connection broke before all was said."""


class Cluster:
    """The part of a cluster's API that jobs need, in one namespace.

    Args:
        config: which cluster and namespace.

    Raises:
        UserError: the client is not installed, or no cluster is configured.
    """

    def __init__(self, config: KubernetesBackendConfig) -> None:
        try:
            import kubernetes
        except ModuleNotFoundError:
            remedy = "install it with: pip install 'luthier[kubernetes]'"
            raise UserError("needs the package kubernetes", where="backend_config", remedy=remedy) from None
        settings, own_namespace = config.client_configuration, None
        try:
            if settings is None:
                settings = kubernetes.client.Configuration()
                if config.config_file is None and config.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                    kubernetes.config.load_incluster_config(client_configuration=settings)
                    own_namespace = (_OF_POD / "namespace").read_text(encoding="utf-8").strip()
                else:
                    kubernetes.config.load_kube_config(config.config_file, config.context, settings)
                    own_namespace = _namespace(config)
        except (kubernetes.config.ConfigException, OSError) as error:
            raise UserError(
                f"no cluster is configured ({first_line(error)})",
                where="backend_config",
                remedy="name a kubeconfig in config_file or KUBECONFIG",
            ) from None
        self.namespace = config.namespace or own_namespace or "default"
        client = kubernetes.client.ApiClient(settings)
        self._host = settings.host
        self._core = kubernetes.client.CoreV1Api(client)
        self._custom = kubernetes.client.CustomObjectsApi(client)

    # --- TrainJobs and runtimes ---------------------------------------------------------------------------------------

    def runtimes(self) -> list[Object]:
        """All that may be named here, by name; of two of one name the namespace's own."""
        custom, what = self._custom, "its runtimes"
        shared = self._ask(what, custom.list_cluster_custom_object, *_KIND, CLUSTER_RUNTIMES)
        own = self._ask(what, custom.list_namespaced_custom_object, *_KIND, self.namespace, RUNTIMES)
        # Items of a list do not say their kind.
        found = {it["metadata"]["name"]: {**it, "kind": "ClusterTrainingRuntime"} for it in shared.get("items") or []}
        found |= {it["metadata"]["name"]: {**it, "kind": "TrainingRuntime"} for it in own.get("items") or []}
        return [found[name] for name in sorted(found)]

    def runtime(self, name: str, kind: str | None = None) -> Object:
        """A runtime.

        Args:
            name: of it.
            kind: TrainingRuntime or ClusterTrainingRuntime; when left out, the namespace's own comes first.

        Raises:
            Missing: there is none.
        """
        custom, what = self._custom, f"runtime {name}"
        if kind != "ClusterTrainingRuntime":
            with contextlib.suppress(Missing):
                get = custom.get_namespaced_custom_object
                return {**self._ask(what, get, *_KIND, self.namespace, RUNTIMES, name), "kind": "TrainingRuntime"}
        found = self._ask(what, custom.get_cluster_custom_object, *_KIND, CLUSTER_RUNTIMES, name)
        return {**found, "kind": "ClusterTrainingRuntime"}

    def train_jobs(self) -> list[Object]:
        """All TrainJobs."""
        found = self._ask("its jobs", self._custom.list_namespaced_custom_object, *_KIND, self.namespace, TRAIN_JOBS)
        jobs: list[Object] = found.get("items") or []
        return jobs

    def train_job(self, name: str) -> Object:
        """A TrainJob.

        Raises:
            Missing: there is none.
        """
        return self._ask(name, self._custom.get_namespaced_custom_object, *_KIND, self.namespace, TRAIN_JOBS, name)

    def create_train_job(self, train_job: Object) -> Object:
        """Make a TrainJob; returns it as the cluster has it.

        Raises:
            Taken: there is one of that name.
            UserError: the cluster refuses it.
        """
        name, create = train_job["metadata"]["name"], self._custom.create_namespaced_custom_object
        return self._ask(name, create, *_KIND, self.namespace, TRAIN_JOBS, train_job)

    def suspend_train_job(self, name: str, suspend: bool) -> None:
        """Say whether a TrainJob is to be suspended.

        Raises:
            Missing: there is none.
        """
        change = {"spec": {"suspend": suspend}}
        patch = self._custom.patch_namespaced_custom_object
        self._ask(name, patch, *_KIND, self.namespace, TRAIN_JOBS, name, change)

    def delete_train_job(self, name: str) -> None:
        """Ask for a TrainJob to go, once all that it has made has gone.

        Raises:
            Missing: there is none.
        """
        delete = self._custom.delete_namespaced_custom_object
        self._ask(name, delete, *_KIND, self.namespace, TRAIN_JOBS, name, propagation_policy="Foreground")

    # --- Secrets ------------------------------------------------------------------------------------------------------

    def create_secret(self, secret: Object) -> None:
        """Make a Secret."""
        what = f"Secret {secret['metadata']['name']}"
        self._ask(what, self._core.create_namespaced_secret, self.namespace, secret)

    def own_secret(self, name: str, owner: Object) -> None:
        """Let a Secret go with a TrainJob."""
        metadata = owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        reference |= {"name": metadata["name"], "uid": metadata.get("uid")}
        change = {"metadata": {"ownerReferences": [reference]}}
        self._ask(f"Secret {name}", self._core.patch_namespaced_secret, name, self.namespace, change)

    def delete_secret(self, name: str) -> None:
        """Delete a Secret, if it is there."""
        with contextlib.suppress(Missing):
            self._ask(f"Secret {name}", self._core.delete_namespaced_secret, name, self.namespace)

    # --- pods ---------------------------------------------------------------------------------------------------------

    def pods(self, job: str | None = None) -> list[Object]:
        """Pods of a job, or of all jobs."""
        selector = JOBSET if job is None else f"{JOBSET}={job}"
        found = self._ask("its pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        pods: list[Object] = found.get("items") or []
        return [pod for pod in pods if JOBSET in labels(pod) and job in (None, labels(pod)[JOBSET])]

    def log(self, pod: str, container: str, *, last: int | None = None) -> list[str]:
        """Lines of a pod's log as it is now.

        Args:
            pod: its name.
            container: in it.
            last: so many lines of the end; all when left out.
        """
        options = {"container": container} | ({"tail_lines": last} if last is not None else {})
        try:
            answer = self._answer(pod, self._core.read_namespaced_pod_log, pod, self.namespace, **options)
        except Missing:
            return []
        lines = answer.data.decode("utf-8", "replace").split("\n")
        return [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]

    def follow_log(self, pod: str, container: str) -> Iterator[tuple[str, str]]:
        """Time and text of a pod's lines from its first on, each as soon as it is written, until its container ends.

        Raises:
            Broken: the connection did not last as long; half a line may have been lost.
        """
        import urllib3

        options = {"container": container, "follow": True, "timestamps": True, "_request_timeout": (10, None)}
        try:
            answer = self._answer(pod, self._core.read_namespaced_pod_log, pod, self.namespace, **options)
        except Missing:
            return
        rest = b""
        try:
            for chunk in answer.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(_dated, lines)
        except urllib3.exceptions.HTTPError:
            raise Broken from None
        finally:
            answer.close()
        if rest:
            yield _dated(rest)

    def events(self) -> list[Object]:
        """All events."""
        events: list[Object] = (
            self._ask("its events", self._core.list_namespaced_event, self.namespace).get("items") or []
        )
        return events

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Object:
        found: Object = json.loads(self._answer(what, function, *arguments, **options).data)
        return found

    def _answer(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the cluster answers, unread; `what` is asked about."""
        import urllib3
        from kubernetes.client import ApiException

        try:
            return function(*arguments, _preload_content=False, **{"_request_timeout": _SECONDS, **options})
        except ApiException as error:
            if error.status == 404 and what not in _KINDS and not function.__name__.startswith("create_"):
                raise Missing(what) from None
            if error.status == 400 and "container" in options:
                raise Missing(what) from None  # it has not begun
            if error.status == 409:
                raise Taken(what) from None
            raise self._refused(error, what) from None
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            remedy = "check the kubeconfig and the network"
            raise UserError(f"cannot be reached ({first_line(reason)})", where=self._host, remedy=remedy) from None

    def _refused(self, error: ApiException, what: str) -> UserError:
        try:
            said = json.loads(error.body).get("message") or error.reason
        except (TypeError, ValueError, AttributeError):
            said = error.reason or f"status {error.status}"
        if error.status == 404 and what in _KINDS:
            return UserError(
                f"has no Kubeflow Trainer ({what} cannot be listed)",
                where=self._host,
                remedy="install it: https://www.kubeflow.org/docs/components/trainer/",
            )
        if error.status == 401:
            return UserError(
                "does not know this user", where=self._host, remedy="log in again, or check the kubeconfig"
            )
        if error.status == 403 and "admission webhook" not in said:
            remedy = "ask whoever runs the cluster for that right"
            return UserError(f"is not allowed here ({said})", where=what, remedy=remedy)
        if 400 <= (error.status or 0) < 500:
            return UserError(f"is refused by the cluster: {said}", where=what)
        return UserError(f"answers with an error of its own ({error.status}: {said})", where=self._host)


_KIND = (GROUP, VERSION)
_KINDS = ("its jobs", "its runtimes")
"""Lists that a cluster with Kubeflow Trainer always has."""


def _namespace(config: KubernetesBackendConfig) -> str | None:
    """The namespace of a kubeconfig's context."""
    import kubernetes

    contexts, active = kubernetes.config.list_kube_config_contexts(config.config_file)
    chosen = next((it for it in contexts if it["name"] == config.context), active)
    found: str | None = chosen["context"].get("namespace")
    return found


def _dated(line: bytes) -> tuple[str, str]:
    """Time and text of a line that begins with its time; times are of one length, so that text tells which is later."""
    time, _, text = line.decode("utf-8", "replace").partition(" ")
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}", text.rstrip("\r")
