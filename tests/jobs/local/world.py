"""What the tests of the local backend share: jobs of a few lines, gates that hold them, processes that resist."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from luthier.jobs.backends.local import LocalBackend
from luthier.jobs.options import LocalBackendConfig
from luthier.jobs.spec import JobSpec
from luthier.jobs.store import JobRecord, JobStore
from luthier.jobs.types import TrainJob

PATIENCE = 60.0
"""Seconds after which something that should have happened has not."""


def shell(name: str, script: str, **more: Any) -> JobSpec:
    """A job whose nodes run a shell script."""
    return JobSpec(name=name, runtime="test", framework="torch", nproc_per_node=1, command=("sh", "-c", script), **more)


class Gate:
    """Holds a job at a line of its script until it is opened; a pipe, so nobody has to look again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.hold = f"read line < {shlex.quote(str(path))}"
        """The line."""

    def open(self) -> None:
        """Let one go on; waits until it is there."""
        self.path.write_text("go\n")


def backend(home: Path, running: int = 4) -> LocalBackend:
    return LocalBackend(LocalBackendConfig(home=home, max_running_jobs=running))


def until(condition: Callable[[], Any]) -> Any:
    """What a condition gives once it is true of anything."""
    end = time.monotonic() + PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < end, "waited for long enough"
        time.sleep(0.02)
    return answer


def ended(local: LocalBackend, name: str, step: str = "node-0") -> TrainJob:
    """A job once it has ended."""
    for _ in local.get_job_logs(name, step, follow=True):
        pass
    return local.get_job(name)


def record(home: Path, name: str) -> JobRecord:
    """What the store knows of a job."""
    found = JobStore(home).find(name)
    assert found is not None
    return found


def log(local: LocalBackend, name: str, step: str = "node-0") -> list[str]:
    return list(local.get_job_logs(name, step, follow=False))


def gone(pid: int) -> bool:
    """Whether there is no such process any more; what has ended and was not taken leave of is none."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:                    # a daemon: not a child of anybody's, in a session of its own
    os.setsid()
    if os.fork():
        os._exit(0)
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
while True:
    time.sleep(60)
"""
"""Two processes that hear no SIGTERM, one of them a daemon; each leaves its number in a directory."""


def stubborn(place: Path) -> str:
    """A script that leaves processes which do all to stay, the environment cleared in two of them. `numbers` has them
    once they are there."""
    words = [sys.executable, "-c", STUBBORN, str(place)]
    return f"env -i {shlex.join(words)} & exec {shlex.join(words)}"


def numbers(place: Path) -> list[int]:
    """Of the four processes of `stubborn`."""
    until(lambda: len(list(place.iterdir())) == 4)
    return [int(path.name) for path in place.iterdir()]


_CLIENT = """
import sys
from pathlib import Path
from tests.jobs.local.world import *
local = backend(Path(sys.argv[1]))
"""


@contextmanager
def client(home: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with a backend called `local`, and what it does with it."""
    words = [sys.executable, "-c", _CLIENT + code, str(home)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        yield process
