"""Metrics on disk: whole lines, nothing twice after a resume; trackers that are missing say how to get them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from luthier.errors import UserError
from luthier.report.metrics import table
from luthier.report.sinks import TRACKERS, JsonlSink, open_tracker


def read(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_row_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"loss": 2.5, "tokens": 7})
    assert read(path) == [{"step": 1, "loss": 2.5, "tokens": 7}]
    sink.write(2, {"loss": float("nan"), "gradient_norm": float("inf")})
    assert read(path)[1] == {"step": 2, "loss": None, "gradient_norm": None}
    sink.close()


def test_a_resumed_run_cuts_off_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 6):
        sink.write(step, {"loss": step})
    sink.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a row
    sink = JsonlSink(path, step=3)
    sink.write(4, {"loss": 40})
    sink.close()
    assert [(row["step"], row["loss"]) for row in read(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    JsonlSink(path).close()
    assert read(path) == []


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_tracker_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"report\.trackers: {name} .*pip install 'luthier\[{name}\]'"):
        open_tracker(name, tmp_path, "project", {})


def test_the_documentation_has_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert table() in text
