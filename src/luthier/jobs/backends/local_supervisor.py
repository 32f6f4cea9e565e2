"""Minds one job of this machine: waits for its turn, runs its steps, and does what is wished of it.

    client -> warden -> supervisor -> a session of its own for each step

The client starts this program with the job and its secrets on standard input, and may end once it has been taken. The
supervisor does the work. The warden does nothing but wait for the supervisor: should that be killed, it ends the job's
processes, which have become its children, and marks the job as failed. Both hold the lock of the job's directory, so
that it is free only when both are gone (`local_upkeep.py` is for that). Neither imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from luthier.errors import UserError
from luthier.jobs.backends.local_steps import StepPlan, devices_of, free_port, phases
from luthier.jobs.backends.local_upkeep import GRACE, SUPERVISOR_LOG, settle
from luthier.jobs.files import lay, write
from luthier.jobs.logs import last_lines
from luthier.jobs.processes import adopt_orphans, descendants, dying_with, end
from luthier.jobs.spec import JobSpec
from luthier.jobs.store import DELETE, FINAL, RUN, SUSPEND, JobStore
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED
from luthier.jobs.wire import node_job, unpacked

SUSPEND_GRACE = 300.0
"""Seconds from SIGTERM to SIGKILL for a job that is suspended: a run saves a checkpoint meanwhile."""
LEFTOVER_GRACE = 2.0
"""Seconds for what a job has left running in the background."""

_TICK = 0.1
"""Seconds after which a wish is heard."""
_NEIGHBOURS = 1.0
"""Seconds after which a job that waits looks whether those ahead of it are still minded."""
_READY = b"taken"


class _Over(Exception):
    """The job has come to an end."""


class _Failed(_Over):
    """The job has failed; says why."""


class _Deleted(_Over):
    """The job is to be forgotten."""


class Supervisor:
    """One job.

    Args:
        store: where the job is.
        uid: of the job.
        spec: of the job, secrets included.
        environment: what the nodes see.
        visible: names of this machine's GPUs.
        limit: jobs that may run at a time.
    """

    def __init__(
        self,
        store: JobStore,
        uid: str,
        spec: JobSpec,
        environment: Mapping[str, str],
        visible: Sequence[str],
        limit: int,
    ) -> None:
        job = store.get(uid)
        assert job is not None
        self._store, self._job, self._spec, self._limit = store, job, spec, limit
        self._environment, self._visible = environment, visible
        self._directory = store.directory(job)
        self._warden = os.getppid()
        self._status = CREATED
        self._wish = RUN
        self._until: float | None = None
        self._running: dict[int, str] = {}
        """Process ids -> steps."""
        self._popen: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[str, int] = {}
        """Steps that have ended -> their exit codes."""
        self._told: int | None = None
        self._awake, wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._tell)

    def run(self) -> None:
        """Mind the job to its end."""
        try:
            with self._store.watch() as self._watch:
                self._steps()
            status, message, grace = COMPLETE, "", LEFTOVER_GRACE
        except _Failed as failure:
            status, message, grace = FAILED, str(failure), GRACE
        except _Deleted:
            end(descendants, GRACE, self._reap)
            return
        end(descendants, grace, self._reap)
        self._note_ended()
        self._store.set_status(self._job.uid, status, message)

    # --- the course of a job ------------------------------------------------------------------------------------------

    def _steps(self) -> None:
        if self._spec.command is None:
            write(self._directory / "job.json", json.dumps(node_job(self._spec, with_files=False)))
        for place in range(len(self._phases())):
            while True:
                self._await_turn()
                if self._phase(self._phases()[place]):  # made anew: a port that was free an hour ago may be taken
                    break

    def _phases(self) -> list[list[StepPlan]]:
        devices = devices_of(self._spec, self._visible)
        return phases(self._spec, self._job.uid, self._directory, self._environment, devices, free_port())

    def _await_turn(self) -> None:
        """Wait until the job may run."""
        looked = float("-inf")
        while not (self._status == RUNNING and self._heard() == RUN):
            if self._heard() == SUSPEND:
                if self._status != SUSPENDED:
                    self._become(SUSPENDED, "")
            elif self._status == SUSPENDED:
                self._store.line_up(self._job.uid)
                self._status = CREATED
                continue
            elif self._changed or time.monotonic() > looked + _NEIGHBOURS:
                looked = time.monotonic()
                self._changed = False
                if self._store.take_turn(self._job.uid, self._limit):
                    self._status = RUNNING
                    limit = self._spec.active_deadline_seconds
                    self._until = time.monotonic() + limit if limit is not None else None
                    return
                self._look_ahead()
            self._wait()

    def _look_ahead(self) -> None:
        """Whether those that this job waits for are still minded: the one before it, or those that run."""
        job = self._store.get(self._job.uid)
        if job is None:
            raise _Deleted
        running, waiting = self._store.ahead(job)
        for other in waiting[-1:] or running:
            try:
                settle(self._store, other)
            except (UserError, OSError) as error:  # another's trouble is not this job's
                print(f"{other.name}: {error}", file=sys.stderr)

    def _phase(self, plans: Sequence[StepPlan]) -> bool:
        """Run steps that begin together; False when they were suspended before all were done."""
        if all(plan.name.startswith("node-") for plan in plans):
            left = plans  # they meet: none goes on without the others
            lay(self._spec.files, self._directory / "workspace")
        else:
            left = [plan for plan in plans if self._codes.get(plan.name) != 0]
        for plan in left:
            self._codes.pop(plan.name, None)
        for plan in left:
            self._start(plan)
        while self._running:
            self._wait()
            self._note_ended()
            for step in [plan.name for plan in left if self._codes.get(plan.name)]:
                raise _Failed(self._why(step, self._codes[step]))
            if self._until is not None and time.monotonic() > self._until:
                limit = self._spec.active_deadline_seconds
                raise _Failed(f"ran longer than its active_deadline_seconds of {limit}")
            if self._heard() == SUSPEND:
                self._suspend()
        if all(self._codes.get(plan.name) == 0 for plan in left):
            return True
        self._become(SUSPENDED, "")
        return False

    def _suspend(self) -> None:
        """Ask the steps to stop, and see that they do."""
        for pid in self._running:
            _pass_on(pid, signal.SIGTERM)
        until = time.monotonic() + SUSPEND_GRACE
        while self._running and time.monotonic() < until:
            self._wait()
            self._heard()
            self._note_ended(suspended=True)
        end(descendants, LEFTOVER_GRACE, self._reap)
        self._note_ended(suspended=True)

    def _become(self, status: str, message: str) -> None:
        self._store.set_status(self._job.uid, status, message)
        self._status = status

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, plan: StepPlan) -> None:
        log = self._directory / "logs" / f"{plan.name}.txt"
        with log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    plan.command,
                    env=plan.environment,
                    cwd=self._directory / "workspace",
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dying_with(os.getpid()),
                )
            except OSError as error:
                out.write(f"{plan.command[0]} cannot be started: {error.strerror}\n".encode())
                out.flush()
                self._store.step_ended(self._job.uid, plan.name, FAILED, 127)
                raise _Failed(self._why(plan.name, 127)) from None
        self._running[process.pid] = plan.name
        self._popen[process.pid] = process
        self._store.step_started(self._job.uid, plan.name, process.pid)

    def _reap(self) -> None:
        """Take leave of children that have ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                code = self._popen[pid].returncode = os.waitstatus_to_exitcode(status)
                self._codes[self._running[pid]] = code if code >= 0 else 128 - code

    def _note_ended(self, *, suspended: bool = False) -> None:
        """Write down which steps have ended, and how."""
        for pid, step in list(self._running.items()):
            if step in self._codes:
                del self._running[pid], self._popen[pid]
                code = self._codes[step]
                status = COMPLETE if code == 0 else SUSPENDED if suspended else FAILED
                self._store.step_ended(self._job.uid, step, status, code)

    def _why(self, step: str, code: int) -> str:
        """Why a step's failure is the job's."""
        end_of_log = last_lines(self._directory / "logs" / f"{step}.txt")
        return f"{step} left with exit code {code}" + (f":\n{end_of_log}" if end_of_log else "")

    # --- what comes from outside --------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until a child ends, a signal comes, or a moment has passed."""
        if select.select([self._awake], [], [], _TICK)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._awake, 4096)
        self._reap()
        if self._told is not None:
            name = signal.Signals(self._told).name
            gone = os.getppid() != self._warden
            raise _Failed("its warden is gone: it was killed" if gone else f"its supervisor was told to stop ({name})")

    def _tell(self, number: int, _: object) -> None:
        self._told = number

    def _heard(self) -> str:
        """What is wished of the job now.

        Raises:
            _Deleted: that it be forgotten.
        """
        if self._watch.changed():
            self._changed = True
            job = self._store.get(self._job.uid)
            self._wish = DELETE if job is None else job.wish
        if self._wish == DELETE:
            raise _Deleted
        return self._wish

    _changed = True


def main(home: str, uid: str, lock: int, limit: int) -> int:
    """Take a job from standard input; returns when it has been taken, and leaves warden and supervisor behind."""
    os.set_inheritable(lock, False)
    given = json.load(sys.stdin)
    listen, speak = os.pipe()
    if os.fork() == 0:
        os.close(listen)
        _be(lambda: _warden(Path(home), uid, given, limit, speak))
    os.close(speak)
    with os.fdopen(listen, "rb") as answer:
        return 0 if answer.read() == _READY else 1


def _warden(home: Path, uid: str, given: Mapping[str, object], limit: int, speak: int) -> None:
    """Start the supervisor, wait for its end, and do what it could not do any more."""
    adopt_orphans()
    warden = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _be(lambda: _supervise(home, uid, given, limit, speak, warden))
    os.close(speak)
    given = {}  # with its secrets
    signal.signal(signal.SIGTERM, lambda number, _: _pass_on(supervisor, number))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    end(descendants, 0.0, _reap_all)
    store = JobStore(home)
    job = store.get(uid)
    if job is None or job.wish == DELETE or job.status in FINAL:
        return
    code = os.waitstatus_to_exitcode(status)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    said = last_lines(store.directory(job) / SUPERVISOR_LOG, 1) if code > 0 else ""
    store.set_status(uid, FAILED, f"its supervisor {how}" + (f": {said}" if said else ""))


def _supervise(home: Path, uid: str, given: Mapping[str, object], limit: int, speak: int, warden: int) -> None:
    os.setsid()  # what is sent to one of the two by its group does not reach the other
    adopt_orphans()
    store = JobStore(home)
    supervisor = Supervisor(store, uid, unpacked(str(given["spec"])), given["environment"], given["devices"], limit)  # type: ignore[arg-type]
    dying_with(warden)()
    store.set_minders(uid, warden, os.getpid())
    os.write(speak, _READY)
    os.close(speak)
    supervisor.run()


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _be(work: object) -> NoReturn:
    """Do something in a process that has been forked, and end it."""
    with _Forked():
        work()  # type: ignore[operator]
    raise AssertionError("not reached")


class _Forked:
    """The whole of a forked process: whatever ends it, nothing of the process that it was forked from goes on in it."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            traceback.print_exception(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
