"""Requests that no client of good will sends: each is answered, none with 500, and the worker lives. `make fuzz` sends
many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from luthier.tinker.server import line
from luthier.tinker.server.routes import futures
from tests.tinker.server.fuzz import fuzz
from tests.tinker.server.house import house_in


def test_nothing_that_is_sent_is_answered_with_500_or_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "HOLD_SECONDS", 1.0)
    monkeypatch.setattr(line, "GAP_SECONDS", 0.0)
    with house_in(tmp_path / "house") as house:
        codes = fuzz(house, seed=0, requests=300)
    assert codes.total() == 300
    assert {200, 400, 404, 422} <= codes.keys()
