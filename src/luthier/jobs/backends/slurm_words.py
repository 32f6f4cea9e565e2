"""The steps of a Slurm job as its script notes them: the accounting may be off, and knows nothing of our steps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from luthier.jobs.backends.slurm_script import SCRIPT_STEP, STEPS
from luthier.jobs.backends.slurm_step import NODE, NODES
from luthier.jobs.spec import gpus_of, step_names
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED, UNKNOWN, Step


class Word:
    """A line of `STEPS`, or of what a node itself noted: a step has started, or has ended with a code."""

    def __init__(self, line: str) -> None:
        time_, attempt, self.step, what = line.split()
        self.time, self.attempt = float(time_), int(attempt)
        self.code = int(what) if what != "started" else None


def read_words(directory: Path) -> list[Word]:
    """What the script said of its steps, in order."""
    return _words(directory / STEPS)


def read_node_words(directory: Path) -> list[Word]:
    """What nodes said of themselves when they ended, the earliest first."""
    nodes = directory / NODES
    files = sorted(nodes.iterdir()) if nodes.is_dir() else []
    return sorted((word for file in files for word in _words(file)), key=lambda word: word.time)


def first_failure(words: list[Word], nodes: list[Word]) -> Word | None:
    """The step that failed first at the last attempt; of nodes the one that says so of itself, where one does."""
    failed = next((word for word in reversed(words) if word.code and word.step != SCRIPT_STEP), None)
    if failed is None or failed.step != NODE:
        return failed
    return next((word for word in nodes if word.code and word.attempt == failed.attempt), failed)


def _words(path: Path) -> list[Word]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    *whole, _ = text.split("\n")  # the last line is not written to its end yet
    return [Word(line) for line in whole]


def names_of(spec: dict[str, Any]) -> list[str]:
    """Names of the steps of a job as it is kept."""
    return step_names(spec["dataset"], spec["model"], spec["num_nodes"], spec["exporter"])


def steps_of(name: str, spec: dict[str, Any], words: list[Word], nodes: list[Word], job: str) -> list[Step]:
    """The steps as they were noted last; of a node that could not say how it ended, srun's word for all of them."""
    gpus = gpus_of(spec["resources_per_node"]) or 0
    processes = spec["nproc_per_node"] if spec["nproc_per_node"] != "auto" else max(1, gpus)
    found = []
    for step in names_of(spec):
        is_node = step.startswith("node-")
        own = [word for word in words if word.step == (NODE if is_node else step)]
        started = next((word for word in reversed(own) if word.code is None), None)
        ended = own[-1] if own and own[-1].code is not None else None
        if own and is_node:
            itself = [word for word in nodes if word.step == step and word.attempt == own[-1].attempt]
            ended = itself[-1] if itself else ended
        status = CREATED
        if ended is not None:
            status = COMPLETE if ended.code == 0 else FAILED
        elif started is not None:
            status = FAILED if job == FAILED else job if job == SUSPENDED else RUNNING
        found.append(
            Step(
                name=step,
                status=status,
                pod_name=f"{name}-{step}",
                device=("gpu" if gpus else "cpu") if is_node else UNKNOWN,
                device_count=str(gpus or processes) if is_node else UNKNOWN,
                started=when(started.time) if started is not None else None,
                ended=when(ended.time) if ended is not None else None,
                exit_code=ended.code if ended is not None else None,
            )
        )
    return found


def when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
