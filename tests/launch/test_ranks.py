"""Ranks that are really started: by our launcher, by torchrun, as srun would; what they say and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ["tests.launch.played", "train", "--model", "debug:llama", "--data", "rows.jsonl", "--output", "run"]


def command(directory: Path, play: str, *words: str, by: tuple[str, ...] = (), **more: str) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-m", *by, *RECIPE, *words],
        "cwd": directory,
        "env": os.environ | {"PLAY": play, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more},
        "text": True,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def run(directory: Path, play: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(directory, play, *words, **more))


def logs(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("run/logs/*/*")}


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    done = run(tmp_path, "sums", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == 3.0
    assert done.stdout.count("\n") == 1
    assert done.stderr == "to standard output, which belongs to the answer\nrank 0 speaks\n"
    assert logs(tmp_path) == {
        f"rank-{rank}.txt": f"to standard output, which belongs to the answer\nrank {rank} speaks\n" for rank in (0, 1)
    }


def test_the_rank_that_failed_is_the_one_that_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "raises", "--nproc", "2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.count("Traceback") == 1  # rank 0 lost its peer, which is nobody's news
    *_, error, last = done.stderr.splitlines()
    assert error == "ZeroDivisionError: on purpose"
    assert last.startswith("rank 1 of 2 failed; its log is run/logs/")
    assert "ZeroDivisionError: on purpose" in Path(tmp_path / last.rpartition(" ")[2]).read_text()
    assert "Traceback" in logs(tmp_path)["rank-0.txt"]


def test_a_mistake_is_one_sentence_and_not_tried_again(tmp_path: Path) -> None:
    done = run(tmp_path, "mistakes", "--nproc", "2", "--max-restarts", "3", "--json")
    assert done.returncode == 2
    assert done.stderr == "error: rows.jsonl: is empty; write something\n"
    error = json.loads(done.stdout)["error"]
    assert error == {
        "kind": "DataError",
        "message": "rows.jsonl: is empty; write something",
        "where": "rows.jsonl",
        "what": "is empty",
        "remedy": "write something",
    }
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_the_command_starts_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "sums", "--nproc", "2", "train.steps=many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: command line: train.steps: "many" is not a whole number\n'
    done = run(tmp_path, "sums", "--nproc", "2", "parallel.tp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: parallel: tp 3 takes a multiple of 3 processes, and there are 2; start 3 (--nproc)"
    )
    assert not (tmp_path / "run").exists()


def test_a_rank_that_was_killed_is_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "dies_once", "--nproc", "2", "--max-restarts", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == 1.0
    told, again = done.stderr.splitlines()
    assert told.startswith("rank 1 of 2 was ended by SIGKILL, as the system does when memory runs out; its log is ")
    assert again == "starting again from the last checkpoint (restart 1 of 1)"
    assert sorted(logs(tmp_path)) == ["rank-0.restart-1.txt", "rank-0.txt", "rank-1.restart-1.txt", "rank-1.txt"]


def test_on_a_terminal_progress_is_drawn_and_not_kept(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(**command(tmp_path, "draws", "--nproc", "2", "--json") | {"stderr": theirs})
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the end of a terminal that nobody has open any more
        pass
    answer, _ = process.communicate()
    os.close(ours)
    assert json.loads(answer)["loss"] == 1.0
    assert b"\r\x1b[2Kstep 2" in shown
    assert b"worth keeping" in shown
    assert logs(tmp_path) == {"rank-0.txt": "worth keeping\n", "rank-1.txt": ""}


@pytest.fixture
def at_work(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that work until they are stopped."""
    play = getattr(request, "param", "stops")
    process = subprocess.Popen(**command(tmp_path, play, "--nproc", "2", "--max-restarts", "1"))
    assert process.stderr is not None
    assert process.stderr.readline() == "at work\n"
    yield process
    process.kill()  # the ranks hear of it
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_ranks_after_the_same_step(at_work: subprocess.Popen[str], number: signal.Signals) -> None:
    at_work.send_signal(number)
    out, err = at_work.communicate()
    assert at_work.returncode == 128 + number
    assert out.splitlines()[0].endswith("loss 1.0000")  # all had done as many steps
    assert out.splitlines()[1] == f"stopped by {number.name} and saved; the same command goes on from here"
    assert err == ""


@pytest.mark.parametrize("at_work", ["hangs"], indirect=True)
def test_a_second_interrupt_stops_at_once(at_work: subprocess.Popen[str]) -> None:
    assert at_work.stderr is not None
    at_work.send_signal(signal.SIGINT)
    assert at_work.stderr.readline() == "heard\n"
    at_work.send_signal(signal.SIGINT)
    out, err = at_work.communicate()
    assert (at_work.returncode, out, err) == (130, "", "interrupted\n")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def test_a_run_goes_on_without_a_machine_that_was_lost(tmp_path: Path) -> None:
    words = ["--nproc=1", "--nnodes=1:2", f"--rdzv-endpoint=localhost:{free_port()}", "--max-restarts=1", "--json"]
    soon = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    nodes = [  # they meet at the first, which has the lower process id and so is rank 0, and stays
        subprocess.Popen(**command(tmp_path, "loses_a_node", *words, PET_RDZV_CONF=f"{soon},is_host={host}"))
        for host in (1, 0)
    ]
    answers = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, -signal.SIGKILL], answers
    assert json.loads(answers[0][0])["loss"] == 1.0
    assert "starting again from the last checkpoint (restart 1 of 1)" in answers[0][1]


def test_torchrun_can_start_the_same_command(tmp_path: Path) -> None:
    by = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m")
    done = run(tmp_path, "sums", "--json", by=by)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == 3.0
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("rank")) == [
        "rank 0 speaks",
        "rank 1 speaks",
    ]


def test_srun_can_start_the_same_command(tmp_path: Path) -> None:
    srun = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    srun |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    tasks = [
        subprocess.Popen(**command(tmp_path, "sums", "--json", SLURM_PROCID=f"{rank}", SLURM_LOCALID=f"{rank}", **srun))
        for rank in range(2)
    ]
    answers = [task.communicate() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], answers
    assert json.loads(answers[0][0])["loss"] == 3.0
    assert answers[1][0] == ""


def test_kubeflow_starts_ranks_without_an_option(tmp_path: Path) -> None:
    done = run(tmp_path, "sums", "--json", PET_NNODES="1", PET_NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == 3.0
