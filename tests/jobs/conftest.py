from __future__ import annotations

from pathlib import Path

import pytest

from luthier.jobs import LocalBackendConfig, TrainerClient


@pytest.fixture
def client(tmp_path: Path) -> TrainerClient:
    """A client of this machine with a home of its own."""
    return TrainerClient(LocalBackendConfig(home=tmp_path / "home"))
