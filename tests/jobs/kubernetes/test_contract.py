"""The contract of all backends, on a cluster whose pods are processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luthier.jobs import TrainerClient
from tests.jobs.kubernetes.cluster import Cluster
from tests.jobs.kubernetes.played import config_of, played_cluster
from tests.jobs.test_contract import CASES, Case


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    with played_cluster(directory) as made:
        yield made


@pytest.fixture
def client(played: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    """A client of the cluster, with no job yet; none outlives the test."""
    monkeypatch.setattr("luthier.jobs.backends.kubernetes._PAUSE", 0.02)
    made = TrainerClient(config_of(played))
    yield made
    for job in made.list_jobs():
        made.delete_job(job.name)


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_it_answers_as_every_backend(case: Case, expected: Any, client: TrainerClient) -> None:
    assert case(client) == expected


def test_packages_are_those_of_the_runtimes_image(client: TrainerClient) -> None:
    packages = client.get_runtime_packages("torch-distributed")
    assert "pydantic" in packages
    assert list(packages) == sorted(packages, key=str.lower)
    assert client.list_jobs() == []
