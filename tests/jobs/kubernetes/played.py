"""A cluster whose pods are processes of this machine: what jobs do there is real, only machines and images are not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes
import yaml

from luthier.jobs.options import KubernetesBackendConfig
from tests.jobs.kubernetes.admission import Object
from tests.jobs.kubernetes.api import NAMESPACE, PROGRESS, TOKEN, Api
from tests.jobs.kubernetes.cluster import Cluster, cluster
from tests.jobs.kubernetes.jobset import expanded, seen

MANIFESTS = Path(__file__).parents[3] / "manifests"
_GRACE_SECONDS = 10
_OURS = ("HF_", "LUTHIER_CACHE", "OMP_NUM_THREADS", "HOME", "LANG", "TMPDIR", "PYTHONPATH")


class Kubelet:
    """Runs pods as processes, each job's in a directory of its own, which is its workspace.

    Args:
        api: of the cluster.
        url: of its server.
        directory: for the workspaces.
    """

    def __init__(self, api: Api, url: str, directory: Path) -> None:
        self._api, self._url, self._directory = api, url, directory
        self._token = directory / "token"
        self._token.write_text(TOKEN)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ports: dict[str, int] = {}

    def run(self, pod: Object) -> None:
        """Start a pod."""
        name = pod["metadata"]["name"]
        self._tasks[name] = asyncio.create_task(self._run(pod))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name, None))

    async def end(self, name: str) -> None:
        """End a pod's processes, and wait until they have."""
        process, task = self._processes.get(name), self._tasks.get(name)
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if task is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """End all pods."""
        for name in list(self._processes):
            await self.end(name)

    async def _run(self, pod: Object) -> None:
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        job = self._api.objects[
            "trainer.kubeflow.org/v1alpha1/trainjobs", NAMESPACE, labels["jobset.sigs.k8s.io/jobset-name"]
        ]
        uid = job.raw["metadata"]["uid"]
        workspace = self._directory / uid
        workspace.mkdir(parents=True, exist_ok=True)
        container = pod["spec"]["containers"][0]
        secrets = {it["metadata"]["name"]: it["stringData"] for it in self._api.all("secrets", NAMESPACE)}
        environment = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
        environment |= seen(container, labels, secrets)
        environment |= {"LUTHIER_WORKSPACE": str(workspace), "PYTHONUNBUFFERED": "1"}
        if container["name"] == "node":  # as Trainer's feature gate TrainJobStatus
            environment["KUBEFLOW_TRAINER_SERVER_URL"] = f"{self._url}{PROGRESS}{job.raw['metadata']['name']}"
            environment["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(self._token)
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if "PET_MASTER_ADDR" in environment:
            port = self._ports.setdefault(uid, _free_port())
            environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        words = [expanded(word, environment) for word in [*container["command"], *(container.get("args") or [])]]
        began = self._api.time()
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=workspace,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[name] = process
        await self._api.set_state(pod, {"running": {"startedAt": began}})
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            await self._api.say(name, [line.decode("utf-8", "replace") for line in lines])
        if rest:
            await self._api.say(name, [rest.decode("utf-8", "replace")])
        code = await process.wait()
        ended = {"exitCode": code if code >= 0 else 128 - code, "startedAt": began, "finishedAt": self._api.time()}
        await self._api.set_state(pod, {"terminated": ended})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def played_cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster with our manifests, those that take the place of Kubeflow's own among them.

    Args:
        directory: for the jobs' workspaces.
    """
    with cluster() as made:
        kubelet = Kubelet(made.api, made.url, directory)
        made.api.run, made.api.end = kubelet.run, kubelet.end
        for place in ("base/runtimes", "replacements"):
            for path in sorted((MANIFESTS / place).glob("*.yaml")):
                if path.stem in ("luthier", "torch-distributed") or path.stem.startswith("luthier-"):
                    made.add_runtime(yaml.safe_load(path.read_text(encoding="utf-8")))
        try:
            yield made
        finally:
            made.wait_for(kubelet.close())


def config_of(made: Cluster) -> KubernetesBackendConfig:
    """How a client reaches a cluster."""
    settings = kubernetes.client.Configuration(host=made.url)
    return KubernetesBackendConfig(namespace=NAMESPACE, client_configuration=settings)
