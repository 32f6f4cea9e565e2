"""A real fine-tune as a job: two nodes of one process each, which meet as machines do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.jobs.backends.local import LocalBackend
from luthier.jobs.spec import JobSpec
from luthier.jobs.store import JobStore
from luthier.jobs.types import COMPLETE, SUSPENDED
from tests.jobs.local.world import ended, log, record, until

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8)
]


def run(tmp_path: Path, nodes: int, **more: Any) -> JobSpec:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "model": "debug:llama",
        "data": {"train": [{"path": str(data)}], "sequence_length": 64},
        "train": {"steps": 3, "rows_per_step": 4, "device": "cpu", "precision": "fp32"},
        "output": "output",
        **more,
    }
    return JobSpec(
        "tune", "luthier", "luthier", nodes, 1, engine="luthier", config=config,
        env={"OMP_NUM_THREADS": "1"}, resources_per_node={"gpu": 0},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.soak
def test_two_nodes_train_one_model(local: LocalBackend, home: Path, tmp_path: Path) -> None:
    local.submit(run(tmp_path, 2))
    job = ended(local, "tune")
    assert job.status == COMPLETE, job.message
    assert [(step.name, step.status, step.exit_code) for step in job.steps] == [
        ("node-0", COMPLETE, 0), ("node-1", COMPLETE, 0),
    ]  # fmt: skip
    status = job.trainer_status
    assert status is not None
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (100, 0)
    assert status.metrics["step"] == 3
    assert status.metrics["loss"] > 0
    output = JobStore(home).directory(record(home, "tune")) / "workspace" / "output"
    assert (output / "export" / "model.safetensors").is_file()
    assert "2 ranks" in (output / "log.txt").read_text()


def test_a_suspended_run_goes_on_from_where_it_was(local: LocalBackend, tmp_path: Path) -> None:
    """It saves a checkpoint when it is told to stop."""
    train = {"steps": 1_000_000, "rows_per_step": 4, "device": "cpu", "precision": "fp32"}
    local.submit(run(tmp_path, 1, train=train))
    until(lambda: local.get_job("tune").trainer_status)
    local.suspend_job("tune")
    until(lambda: local.get_job("tune").status == SUSPENDED)
    saved = next(int(words[0]) for line in log(local, "tune") if (words := line.split())[1:2] == ["of"])
    local.resume_job("tune")
    assert f"going on from step {saved:,}" in local.get_job_logs("tune", "node-0", follow=True)
