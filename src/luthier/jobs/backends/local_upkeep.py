"""Jobs that nobody minds any more: their processes end, and they are marked or removed. Anybody may do it.

Whoever minds a job holds the lock of its directory, and a lock ends with its holder. A job that should be going on
while its lock is free has lost its supervisor and its warden; whoever tidies up after it holds the lock meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import psutil

from luthier.errors import UserError
from luthier.jobs.locks import take
from luthier.jobs.logs import last_lines
from luthier.jobs.processes import end, of_job
from luthier.jobs.store import DELETE, FINAL, JobRecord, JobStore
from luthier.jobs.types import FAILED

LOCK, SUPERVISOR_LOG = "supervisor.lock", "supervisor.txt"
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for the processes of a job that has failed or is to be deleted."""

_PAUSE = 0.05
_SLACK = 10.0
"""Seconds that a supervisor may need besides."""


def settle(store: JobStore, job: JobRecord) -> JobRecord | None:
    """A job as it is, after what its minders could not do any more has been done for them; None when it is gone."""
    if job.status in FINAL and job.wish != DELETE:
        return job
    directory = store.directory(job)
    lock = _lock(directory)
    if lock is None and directory.is_dir():
        return job
    try:
        now = store.get(job.uid)
        if now is None or (now.status in FINAL and now.wish != DELETE):
            return now
        if now.wish == DELETE:
            _erase(store, now, directory)
            return None
        _end(now)
        what = "its supervisor is gone: it was killed, or the machine was started anew"
        if now.supervisor is None:
            what = "whoever submitted it ended before it had a supervisor"
        elif said := last_lines(directory / SUPERVISOR_LOG, 1):
            what += f"; its last words: {said}"
        store.set_status(job.uid, FAILED, what if directory.is_dir() else f"its directory {directory} is gone")
        return store.get(job.uid)
    finally:
        if lock is not None:
            os.close(lock)


def remove(store: JobStore, job: JobRecord) -> None:
    """End a job's processes, wait until they are gone, and forget it.

    Raises:
        UserError: one of them cannot be ended.
    """
    store.wish(job.uid, DELETE)
    directory = store.directory(job)
    patience = time.monotonic() + GRACE + _SLACK
    while (lock := _lock(directory)) is None and directory.is_dir():
        if time.monotonic() > patience:
            _end_minders(job)
        time.sleep(_PAUSE)
    try:
        _erase(store, store.get(job.uid) or job, directory)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return take(directory / LOCK, wait=False)
    return None


def _end(job: JobRecord) -> list[int]:
    sessions = {step.pid: step.started for step in job.steps if step.pid is not None and step.started is not None}
    return end(lambda: of_job(job.uid, sessions), grace=0.0)


def _erase(store: JobStore, job: JobRecord, directory: Path) -> None:
    if left := _end(job):
        what = f"{'process' if len(left) == 1 else 'processes'} {', '.join(map(str, left))} cannot be ended"
        raise UserError(what, where=job.name, remedy="delete it again later; the machine may need a restart")
    with contextlib.suppress(FileNotFoundError):  # another does the same
        shutil.rmtree(directory)
    store.remove(job.uid)


def _end_minders(job: JobRecord) -> None:
    """End a supervisor that does not answer, and its warden."""
    for pid in (job.warden, job.supervisor):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid) if pid is not None else None
            if process is not None and job.uid in process.cmdline():
                process.kill()
