"""Jobs of this machine as they are kept: a SQLite database, and a directory for each.

    HOME/jobs.sqlite3                what is known of all jobs
    HOME/jobs/NAME-UID/
        workspace/                   working directory of every step: dataset/, model/, output/
        logs/STEP.txt                what a step wrote to standard output and standard error
        supervisor.txt               what the supervisor itself had to say
        supervisor.lock              held as long as somebody minds the job

Any number of processes read and write at once. Each change is one transaction that is on the disk when it returns.
Secrets and values of environment variables are never written here.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luthier.errors import UserError
from luthier.jobs.locks import locked
from luthier.jobs.messages import duplicate
from luthier.jobs.spec import JobSpec
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED
from luthier.jobs.wire import described

FINAL = (COMPLETE, FAILED)
"""Statuses that nothing comes after."""

RUN, SUSPEND, DELETE = "run", "suspend", "delete"
"""What is wished of a job; its supervisor sees to it."""

_VERSION = 1
_PATIENCE = 60.0
"""Seconds that a transaction waits for others: fifty jobs may begin at once on a slow disk."""

_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    uid TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    status TEXT NOT NULL,
    message TEXT NOT NULL DEFAULT '',
    wish TEXT NOT NULL,
    turn INTEGER NOT NULL,
    created REAL NOT NULL,
    warden INTEGER,
    supervisor INTEGER
);
CREATE TABLE steps (
    uid TEXT NOT NULL REFERENCES jobs (uid) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    name TEXT NOT NULL,
    status TEXT NOT NULL,
    devices INTEGER NOT NULL,
    started REAL,
    ended REAL,
    exit_code INTEGER,
    pid INTEGER,
    PRIMARY KEY (uid, name)
);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    uid TEXT NOT NULL REFERENCES jobs (uid) ON DELETE CASCADE,
    time REAL NOT NULL,
    step TEXT,
    reason TEXT NOT NULL,
    message TEXT NOT NULL
);
CREATE INDEX events_of ON events (uid);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_STEPS = "SELECT name, status, devices, started, ended, exit_code, pid FROM steps WHERE uid = ? ORDER BY place"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of a job.

    Attributes:
        status: as a job's.
        devices: GPUs that its processes see.
        started, ended: seconds since 1970.
        exit_code: 128 and the signal's number where one ended it.
        pid: of its first process, which is also its session.
    """

    name: str
    status: str
    devices: int
    started: float | None
    ended: float | None
    exit_code: int | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job.

    Attributes:
        number: counts up with every job that comes.
        uid: tells it from another of its name, before or after.
        spec: as `described` has it.
        wish: what is wished of it: run, suspend, delete.
        turn: jobs begin by ascending turns.
        created: seconds since 1970.
        warden, supervisor: process ids of those who mind it.
    """

    number: int
    name: str
    uid: str
    spec: dict[str, Any]
    status: str
    message: str
    wish: str
    turn: int
    created: float
    warden: int | None
    supervisor: int | None
    steps: tuple[StepRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened.

    Attributes:
        time: seconds since 1970.
        step: that it happened to; None for the job.
    """

    time: float
    step: str | None
    reason: str
    message: str


def home_directory(chosen: Path | str | None = None) -> Path:
    """Where the jobs of this user are: as chosen, else LUTHIER_HOME, else the user's data directory of the platform."""
    chosen = chosen or os.environ.get("LUTHIER_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "luthier"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "luthier"


class JobStore:
    """The database of a home, made when it is not there.

    Args:
        home: directory; made for its owner alone.

    Raises:
        UserError: it cannot be used.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "jobs.sqlite3"
        remedy = "set LUTHIER_HOME to a directory on a local disk that you can write to"
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            (home / "jobs").mkdir(mode=0o700, exist_ok=True)
            # What is written to the logs is only its owner's, whatever the home's permissions were before.
            (home / "jobs").chmod(0o700)
            with locked(home / "jobs.lock"):
                self._prepare()
        except OSError as error:
            raise UserError(f"cannot be used ({error.strerror or error})", where=str(home), remedy=remedy) from None
        except sqlite3.Error as error:
            raise UserError(f"cannot be used ({error})", where=str(self.path), remedy=remedy) from None

    def _prepare(self) -> None:
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives its other files the same mode
        with self._connected() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.executescript(_SCHEMA)
            elif version != _VERSION:
                raise UserError(
                    f"was written by another version of Luthier (format {version}, not {_VERSION})",
                    where=str(self.path),
                    remedy="set LUTHIER_HOME to another directory",
                )

    def directory(self, job: JobRecord) -> Path:
        """Of a job."""
        return self.home / "jobs" / f"{job.name}-{job.uid}"

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> JobRecord | None:
        """The job of that name; None when there is none."""
        return next(iter(self._jobs("WHERE name = ?", name)), None)

    def get(self, uid: str) -> JobRecord | None:
        """The very job; None when it has been deleted."""
        return next(iter(self._jobs("WHERE uid = ?", uid)), None)

    def list(self) -> Sequence[JobRecord]:
        """All jobs, the oldest first."""
        return self._jobs("")

    def ahead(self, job: JobRecord) -> tuple[Sequence[JobRecord], Sequence[JobRecord]]:
        """The jobs that run, and those that wait and come before this one, by turns."""
        running = self._jobs("WHERE status = ?", RUNNING)
        waiting = self._jobs("WHERE status = ? AND wish = ? AND turn < ?", CREATED, RUN, job.turn)
        return running, sorted(waiting, key=lambda other: other.turn)

    def events(self, uid: str) -> Sequence[EventRecord]:
        """What has happened to a job, the oldest first."""
        with self._connected() as connection:
            query = "SELECT time, step, reason, message FROM events WHERE uid = ? ORDER BY number"
            return [EventRecord(**dict(row)) for row in connection.execute(query, (uid,))]

    def _jobs(self, condition: str, *values: object) -> Sequence[JobRecord]:
        with self._connected() as connection:
            connection.execute("BEGIN")  # so that jobs and steps are of one moment
            jobs = connection.execute(f"SELECT * FROM jobs {condition} ORDER BY number", values).fetchall()
            found = []
            for row in jobs:
                columns = dict(row)
                steps = connection.execute(_STEPS, (columns["uid"],))
                spec = json.loads(columns.pop("spec"))
                found.append(JobRecord(**columns, spec=spec, steps=tuple(StepRecord(**dict(step)) for step in steps)))
            connection.execute("COMMIT")
            return found

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """A way to ask cheaply whether anything has changed."""
        with self._connected() as connection:
            yield Watch(connection)

    # --- writing ------------------------------------------------------------------------------------------------------

    def add(self, uid: str, spec: JobSpec, devices: int) -> JobRecord:
        """Take a new job.

        Args:
            devices: GPUs that each node sees.

        Raises:
            UserError: there is one of its name.
        """
        try:
            with self._changing() as connection:
                turn = connection.execute("SELECT coalesce(max(turn), 0) + 1 FROM jobs").fetchone()[0]
                connection.execute(
                    "INSERT INTO jobs (name, uid, spec, status, wish, turn, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (spec.name, uid, json.dumps(described(spec)), CREATED, RUN, turn, time.time()),
                )
                rows = [
                    (uid, place, name, CREATED, devices if name.startswith("node-") else 0)
                    for place, name in enumerate(spec.steps())
                ]
                connection.executemany(
                    "INSERT INTO steps (uid, place, name, status, devices) VALUES (?, ?, ?, ?, ?)", rows
                )
                _tell(connection, uid, None, "Submitted", f"{spec.name} has been taken")
        except sqlite3.IntegrityError:
            raise duplicate(spec.name) from None
        job = self.get(uid)
        assert job is not None
        return job

    def set_minders(self, uid: str, warden: int, supervisor: int) -> None:
        """Note the process ids of those who mind a job."""
        with self._changing() as connection:
            connection.execute("UPDATE jobs SET warden = ?, supervisor = ? WHERE uid = ?", (warden, supervisor, uid))

    def wish(self, uid: str, wish: str) -> None:
        """Say what is wished of a job. What is wished for deletion stays so."""
        with self._changing() as connection:
            connection.execute("UPDATE jobs SET wish = ? WHERE uid = ? AND wish <> ?", (wish, uid, DELETE))

    def take_turn(self, uid: str, limit: int) -> bool:
        """Let a job run if it is the first of those that wait and fewer than `limit` run."""
        with self._changing() as connection:
            first = connection.execute(
                "SELECT uid FROM jobs WHERE status = ? AND wish = ? ORDER BY turn LIMIT 1", (CREATED, RUN)
            ).fetchone()
            running = connection.execute("SELECT count(*) FROM jobs WHERE status = ?", (RUNNING,)).fetchone()[0]
            if first is None or first[0] != uid or running >= limit:
                return False
            _set(connection, uid, RUNNING, "")
            _tell(connection, uid, None, "Running", "its turn has come")
            return True

    def line_up(self, uid: str) -> None:
        """Let a suspended job wait for its turn again, behind the others."""
        with self._changing() as connection:
            _set(connection, uid, CREATED, "")
            connection.execute("UPDATE jobs SET turn = (SELECT max(turn) + 1 FROM jobs) WHERE uid = ?", (uid,))
            connection.execute("UPDATE steps SET status = ? WHERE uid = ? AND status = ?", (CREATED, uid, SUSPENDED))
            _tell(connection, uid, None, "Resumed", "it waits for its turn")

    def set_status(self, uid: str, status: str, message: str) -> None:
        """Where a job is now. When it has come to an end, so have its steps: those that ran have failed, and those
        that never began stay as they are."""
        with self._changing() as connection:
            done = connection.execute("SELECT status FROM jobs WHERE uid = ?", (uid,)).fetchone()
            if done is None or done[0] in FINAL:
                return
            _set(connection, uid, status, message)
            if status in (FAILED, SUSPENDED):
                connection.execute(
                    "UPDATE steps SET status = ?, ended = coalesce(ended, ?) WHERE uid = ? AND status = ?",
                    (status, time.time(), uid, RUNNING),
                )
            _tell(connection, uid, None, status, message)

    def step_started(self, uid: str, step: str, pid: int) -> None:
        """Note that a step runs."""
        with self._changing() as connection:
            connection.execute(
                "UPDATE steps SET status = ?, started = ?, ended = NULL, exit_code = NULL, pid = ? "
                "WHERE uid = ? AND name = ?",
                (RUNNING, time.time(), pid, uid, step),
            )
            _tell(connection, uid, step, "Started", f"process {pid}")

    def step_ended(self, uid: str, step: str, status: str, exit_code: int) -> None:
        """Note how a step has ended."""
        with self._changing() as connection:
            connection.execute(
                "UPDATE steps SET status = ?, ended = ?, exit_code = ? WHERE uid = ? AND name = ?",
                (status, time.time(), exit_code, uid, step),
            )
            _tell(connection, uid, step, status, f"exit code {exit_code}")

    def remove(self, uid: str) -> None:
        """Forget a job."""
        with self._changing() as connection:
            connection.execute("DELETE FROM jobs WHERE uid = ?", (uid,))

    # --- the database -------------------------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # One for each use: it may then be used from every thread, and after a fork.
        connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            with ExitStack() as unless_done:
                unless_done.callback(connection.execute, "ROLLBACK")
                yield connection
                unless_done.pop_all()
            connection.execute("COMMIT")


class Watch:
    """Tells whether another process has changed the database; costs no reading of it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._version: int | None = None

    def changed(self) -> bool:
        """Whether it has since the last time this was asked; the first time it has."""
        version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        before, self._version = self._version, version
        return bool(version != before)


def _set(connection: sqlite3.Connection, uid: str, status: str, message: str) -> None:
    connection.execute("UPDATE jobs SET status = ?, message = ? WHERE uid = ?", (status, message, uid))


def _tell(connection: sqlite3.Connection, uid: str, step: str | None, reason: str, message: str) -> None:
    connection.execute(
        "INSERT INTO events (uid, time, step, reason, message) VALUES (?, ?, ?, ?, ?)",
        (uid, time.time(), step, reason, message),
    )
