"""A node's process by itself, as a pod starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.local.world import gone, until
from tests.jobs.status_server import status_server

ROOT = Path(__file__).parents[2]


def node(directory: Path, job: Any, **variables: str) -> subprocess.Popen[str]:
    """Start a node in a directory.

    Args:
        job: as JSON has it; text is taken as it stands.
        variables: of its environment.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "LUTHIER_"))}
    environment |= {"PYTHONPATH": str(ROOT), "LUTHIER_JOB": job if isinstance(job, str) else json.dumps(job)}
    return subprocess.Popen(
        [sys.executable, "-m", "luthier.jobs.node"],
        cwd=directory,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def echo(then: str = "", code: int = 0, **more: Any) -> dict[str, Any]:
    config = {"then": then, "code": code, "output": "out", "text": "null: 1", "rate": 1e-5, "no": None, "off": False}
    return {"engine": "tests.jobs.own_engine:echo", "config": config, "num_nodes": 1, "nproc_per_node": 2, **more}


def test_the_engine_gets_the_run_and_the_meeting_point(tmp_path: Path) -> None:
    job = echo(code=3, files={"own/x.txt": "laid"})
    process = node(tmp_path, job, PET_NODE_RANK="1", PET_NNODES="2", PET_MASTER_ADDR="host")
    out, err = process.communicate()
    assert (process.returncode, err) == (3, "")
    said = json.loads(out)
    assert said["run"] == job["config"]
    assert said["environment"] == {
        "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "host", "PET_NPROC_PER_NODE": "2",
    }  # fmt: skip
    assert (tmp_path / "own" / "x.txt").read_text() == "laid"


def test_the_job_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(echo()))
    process = node(tmp_path, "", LUTHIER_JOB_FILE=str(tmp_path / "job.json"))
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("", "LUTHIER_JOB: has no job; set LUTHIER_JOB to JSON with a function, or with engine and config"),
        ("[1]", "LUTHIER_JOB: has no job; set LUTHIER_JOB to JSON with a function, or with engine and config"),
        ("{", "LUTHIER_JOB: is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        (
            {**echo(), "engine": "no"},
            'engine: there is no engine "no"; use one of huggingface, luthier, or name one as',
        ),
        (echo(files={"../x": ""}), "files.../x: leads out of the workspace; give a relative path"),
    ],
)
def test_what_is_no_job(tmp_path: Path, job: Any, message: str) -> None:
    process = node(tmp_path, job)
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, number: int) -> None:
    process = node(tmp_path, echo("wait"))
    until((tmp_path / "ready").exists)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (5 if number == signal.SIGTERM else 128 + number)


def test_an_engine_that_was_killed(tmp_path: Path) -> None:
    process = node(tmp_path, echo("die"))
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL


def test_the_engine_ends_with_its_node(tmp_path: Path) -> None:
    process = node(tmp_path, echo("wait"))
    until((tmp_path / "ready").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    until(lambda: all(gone(int(pid)) for pid in children))


def test_the_first_node_says_how_far_it_is(tmp_path: Path) -> None:
    job = echo("rows")
    job["config"]["train"] = {"steps": 4}
    with status_server() as (url, said):
        for rank in ("1", "0"):
            (tmp_path / rank).mkdir()
            process = node(tmp_path / rank, job, KUBEFLOW_TRAINER_SERVER_URL=url, PET_NODE_RANK=rank)
            process.communicate()
            assert process.returncode == 0
            assert len(said) == (rank == "0")
    status = said[0][1]["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (25, 6)
