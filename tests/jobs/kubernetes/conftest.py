"""A cluster, and its backend."""

from __future__ import annotations

from collections.abc import Iterator

import kubernetes
import pytest
import yaml

from luthier.jobs.backends.kubernetes import KubernetesBackend
from luthier.jobs.options import KubernetesBackendConfig
from tests.jobs.kubernetes.admission import upstream_runtimes
from tests.jobs.kubernetes.api import NAMESPACE
from tests.jobs.kubernetes.cluster import Cluster, cluster
from tests.jobs.kubernetes.test_manifests import MANIFESTS

OURS = ("luthier", "luthier-qwen2.5-0.5b", "luthier-llama3.1-70b")


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with cluster() as started:
        for runtime in upstream_runtimes():
            started.add_runtime(runtime)
        for name in OURS:
            started.add_runtime(yaml.safe_load((MANIFESTS / f"base/runtimes/{name}.yaml").read_text(encoding="utf-8")))
        yield started


@pytest.fixture
def world(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, which forgets nothing between tests: each names its own jobs."""
    monkeypatch.setattr("luthier.jobs.backends.kubernetes._PAUSE", 0.02)
    return made


@pytest.fixture
def config(world: Cluster) -> KubernetesBackendConfig:
    settings = kubernetes.client.Configuration(host=world.url)
    return KubernetesBackendConfig(namespace=NAMESPACE, client_configuration=settings)


@pytest.fixture
def backend(config: KubernetesBackendConfig) -> KubernetesBackend:
    return KubernetesBackend(config)
