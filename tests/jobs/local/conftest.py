from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from luthier.jobs.backends.local import LocalBackend
from tests.jobs.local.world import Gate, backend


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home; nothing that was started in it outlives the test."""
    place = tmp_path / "home"
    yield place
    local = backend(place)
    for job in local.list_jobs():
        local.delete_job(job.name)


@pytest.fixture
def local(home: Path) -> LocalBackend:
    return backend(home)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")
