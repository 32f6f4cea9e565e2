"""Processes of a job: they end with whoever minds them, and all of them can be found, whatever they did to hide.

Three things lead to a process: its parents (orphans go to the job's supervisor, then to its warden, instead of to
init), its session, and a variable in its environment. On systems other than Linux the last two have to do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

import psutil

MARK = "LUTHIER_JOB_UID"
"""The environment variable that every process of a job has: the job's uid."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAUSE = 0.02
_PATIENCE = 30.0
"""Seconds that a process may take to die of SIGKILL; one with much memory takes some."""
_CLOCK = 2.0
"""Seconds by which the system's idea of when a process began may differ from when we noted it."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dying_with(parent: int, number: int = signal.SIGTERM) -> Callable[[], None]:
    """What a child calls first to get a signal when its parent ends.

    Args:
        parent: process id of the parent.
        number: of the signal.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # not looked up between fork and exec

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it went before it could be asked
            os.kill(os.getpid(), number)

    return ask


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def of_job(uid: str, sessions: Mapping[int, float]) -> list[psutil.Process]:
    """The processes of a job that nobody minds any more, by mark and session; never this one.

    Args:
        uid: of the job.
        sessions: of its steps -> when they began, in seconds since 1970.
    """
    booted = psutil.boot_time()
    sessions = {session: began for session, began in sessions.items() if began > booted}
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARK) == uid or _within(process, sessions):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or gone
            continue
    return found


def _within(process: psutil.Process, sessions: Mapping[int, float]) -> bool:
    """Whether it is in one of the sessions, and not in another that got the same number later."""
    began = sessions.get(os.getsid(process.pid))
    if began is None:
        return False
    after = process.create_time() - began
    is_first = process.pid in sessions
    return bool(abs(after) < _CLOCK if is_first else after > -_CLOCK)


def end(find: Callable[[], list[psutil.Process]], grace: float, tick: Callable[[], object] = lambda: None) -> list[int]:
    """End processes and wait until they are gone: SIGTERM, then SIGKILL for what is left.

    Args:
        find: gives those that there are now. It is asked until it gives none, so that what they start dies too.
        grace: seconds between the two.
        tick: called while waiting: a parent reaps its children there.

    Returns:
        process ids of those that the system cannot end, as when they hang inside the kernel.
    """
    until = time.monotonic() + grace
    told: set[tuple[int, float]] = set()
    while True:
        tick()
        alive = [process for process in find() if _alive(process)]
        now = time.monotonic()
        if not alive or now > until + _PATIENCE:
            return [process.pid for process in alive]
        for process in alive:
            try:
                if now >= until:
                    process.kill()
                elif (identity := (process.pid, process.create_time())) not in told:
                    told.add(identity)
                    process.terminate()
            except psutil.Error:
                continue
        time.sleep(_PAUSE)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
