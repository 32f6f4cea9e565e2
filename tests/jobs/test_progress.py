"""How far a run is, and saying so to a real HTTP server."""

from __future__ import annotations

import json
import math
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from luthier.jobs.progress import METRICS, ProgressPoster, post, read_progress
from luthier.jobs.types import TrainerStatus
from tests.jobs.status_server import status_server


def rows(run: Path, *entries: dict[str, Any], tail: str = "") -> None:
    (run / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)


def test_before_the_first_row(tmp_path: Path) -> None:
    assert read_progress(tmp_path, {}) is None
    rows(tmp_path, tail='{"step": 1')
    assert read_progress(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("train", "step", "epoch", "percent", "left"),
    [
        ({"steps": 200}, 3, 0.1, 1, 197 * 2),
        ({"steps": 200}, 199, 9.0, 99, 2),
        ({"steps": 200}, 200, 9.0, 100, 0),
        ({"steps": 3, "epochs": None}, 1, 0.1, 33, 4),
        ({"epochs": 2.0}, 30, 0.5, 25, 90 * 2),
        ({"epochs": 2.0}, 120, 2.0, 100, 0),
        ({}, 10, 0.25, 25, 30 * 2),
        ({"epochs": None, "steps": None}, 10, 0.9999, 99, 0),
    ],
)
def test_progress_is_by_steps_or_by_passes(
    tmp_path: Path, train: dict[str, Any], step: int, epoch: float, percent: int, left: int
) -> None:
    first = {"step": step - 1, "epoch": epoch, "step_seconds": 50.0}  # slow, as first steps are
    rows(tmp_path, first, {"step": step, "epoch": epoch, "loss": 1.5, "step_seconds": 2.0}, tail='{"step": 9')
    status = read_progress(tmp_path, {"train": train})
    assert status is not None
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (percent, left)
    assert status.metrics == {"step": step, "epoch": epoch, "loss": 1.5, "step_seconds": 2.0}
    assert status.last_updated_time is not None
    assert abs((datetime.now(UTC) - status.last_updated_time).total_seconds()) < 3600


def test_the_newest_of_each_metric(tmp_path: Path) -> None:
    rows(tmp_path, {"step": 1, "loss": 3.0}, {"step": 1, "validation_loss": 2.0}, {"step": 2, "loss": None})
    status = read_progress(tmp_path, None)
    assert status is not None
    assert status.metrics == {"step": 2, "loss": 3.0, "validation_loss": 2.0}
    assert status.progress_percentage is None


@pytest.mark.parametrize(
    ("spoilt", "percent", "left"),
    [
        ('{"step": 4, "epoch": 0.5}', 50, None),  # no pace yet
        ('{"epoch": 0.5, "step_seconds": 1}', 50, None),  # no step
        ('{"epoch": NaN, "step": 4, "step_seconds": 1}', None, None),
        ('{"epoch": 1e999, "step": 4, "step_seconds": 1}', None, None),
        ('{"epoch": -1, "step": 4, "step_seconds": 1}', None, None),
        ('{"epoch": 0.5, "step": Infinity, "step_seconds": 1}', 50, None),
        ('{"epoch": 0.5, "step": 4, "step_seconds": NaN}', 50, None),
        ('{"epoch": 0.5, "step": 4, "step_seconds": 1, "loss": 1' + "0" * 400 + "}", 50, 4),
        ("[" * 100_000 + '\n{"epoch": 0.5, "step": 4, "step_seconds": 1}', 50, 4),
        ('\0\0\0\n[1]\n"epoch"\n{"epoch": 0.5, "step": 4, "step_seconds": 1}', 50, 4),
    ],
)
def test_a_spoilt_file_is_read_as_far_as_it_goes(
    tmp_path: Path, spoilt: str, percent: int | None, left: int | None
) -> None:
    (tmp_path / METRICS).write_text(spoilt + "\n")
    status = read_progress(tmp_path, {})
    assert status is not None
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (percent, left)


def test_a_directory_in_its_place_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    assert read_progress(tmp_path, {}) is None


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    rows(tmp_path, {"old": 1}, *({"step": step, "step_seconds": 1.0} for step in range(10_000)))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b"\xff not a row\n[1]\n")
    status = read_progress(tmp_path, {"train": {"steps": 10_000}})
    assert status is not None
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (99, 1)
    assert "old" not in status.metrics


def test_the_cluster_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    when = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    many = {f"m{number}": math.pi for number in range(300)}
    with status_server() as (url, said):
        post(url, TrainerStatus(45, 90, {"loss": 1.5, **many}, when))
    [(headers, body)] = said
    assert headers["Authorization"] == "Bearer t0ken"
    status = body["trainerStatus"]
    metrics = status.pop("metrics")
    assert (metrics[0], len(metrics)) == ({"name": "loss", "value": "1.5"}, 256)
    assert status == {
        "progressPercentage": 45,
        "estimatedRemainingSeconds": 90,
        "lastUpdatedTime": "2026-05-04T03:02:01+00:00",
    }


def test_the_last_word_is_said(tmp_path: Path) -> None:
    with status_server() as (url, said):
        poster = ProgressPoster(tmp_path, {"train": {"steps": 2}}, url)
        poster.start()
        rows(tmp_path, {"step": 2, "epoch": 1.0, "step_seconds": 1.0})
        poster.close()
    assert [body["trainerStatus"]["progressPercentage"] for _, body in said] == [100]
    for address in ("http://127.0.0.1:9/nobody", "no address"):
        again = ProgressPoster(tmp_path, {"train": {"steps": 2}}, address)
        again.start()
        again.close()  # a server that is not there costs nothing


def test_an_answer_that_is_none_costs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")

        peer = threading.Thread(target=answer)
        peer.start()
        with pytest.raises(OSError, match="what"):
            post(f"http://127.0.0.1:{port}/", TrainerStatus(45))
        peer.join()
