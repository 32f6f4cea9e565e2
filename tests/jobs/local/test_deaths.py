"""Who may die without harm: the client, the supervisor, its warden, both at once; and jobs that come by the dozen."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from luthier.jobs.backends.local import LocalBackend
from luthier.jobs.store import JobRecord, JobStore
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING
from tests.jobs.local.world import (
    Gate,
    backend,
    client,
    ended,
    gone,
    log,
    numbers,
    record,
    shell,
    stubborn,
    until,
)


def test_a_killed_client_finds_its_job_again(home: Path, gate: Gate) -> None:
    code = f"""
local.submit(shell("one", "echo begun; {gate.hold}; echo 7 > result; echo done"))
for line in local.get_job_logs("one", "node-0", follow=True):
    print(line, flush=True)
"""
    with client(home, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
    local = backend(home)
    assert [(job.name, job.status) for job in local.list_jobs()] == [("one", RUNNING)]
    gate.open()
    assert ended(local, "one").status == COMPLETE
    assert log(local, "one") == ["begun", "done"]
    job = record(home, "one")
    assert (JobStore(home).directory(job) / "workspace" / "result").read_text() == "7\n"


def kill(job: JobRecord, *minders: str) -> None:
    for minder in minders:  # the first one first: it could not tell of the other's death
        os.kill(getattr(job, minder), signal.SIGKILL)


DEATHS: list[tuple[tuple[str, ...], str]] = [
    (("supervisor",), "its supervisor was ended by SIGKILL"),
    (("warden",), "its warden is gone: it was killed"),
    (("warden", "supervisor"), "its supervisor is gone: it was killed, or the machine was started anew"),
]


@pytest.mark.parametrize(("minders", "reason"), DEATHS, ids=["supervisor", "warden", "both"])
def test_a_killed_supervisor_leaves_no_orphan(
    local: LocalBackend, home: Path, tmp_path: Path, minders: tuple[str, ...], reason: str
) -> None:
    place = tmp_path / "processes"
    place.mkdir()
    local.submit(shell("one", stubborn(place)))
    processes = numbers(place)
    minded = record(home, "one")
    if len(minders) == 2:
        os.kill(minded.warden or 0, signal.SIGSTOP)  # so that it cannot do its work in between
        kill(minded, "supervisor", "warden")
        # Only a parent would know a daemon that has also cleared its environment, and there is none left.
        [unknown] = [pid for pid in processes if os.getsid(pid) not in sessions(home) and not marked(pid)]
        os.kill(unknown, signal.SIGKILL)
    else:
        kill(minded, *minders)
    job = until(lambda: (now := local.get_job("one")).status == FAILED and now)
    assert job.message == reason
    assert job.steps[0].status == FAILED
    assert [pid for pid in processes if not gone(pid)] == []
    assert local.get_job_events("one")[-1].message == reason


def sessions(home: Path) -> list[int | None]:
    return [step.pid for step in record(home, "one").steps]


def marked(pid: int) -> bool:
    return b"LUTHIER_JOB_UID=" in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_job_that_waits_does_not_wait_for_the_dead(home: Path) -> None:
    """Nobody but the supervisors of the other jobs looks."""
    local = backend(home, running=1)
    for name in ("runs", "waits", "third"):
        local.submit(shell(name, "exec sleep 600" if name == "runs" else "true"))
    until(lambda: record(home, "runs").steps[0].pid)
    for name in ("waits", "runs"):
        job = record(home, name)
        os.kill(job.warden or 0, signal.SIGSTOP)
        kill(job, "supervisor", "warden")
    until(lambda: record(home, "third").status == COMPLETE)
    assert [record(home, name).status for name in ("runs", "waits")] == [FAILED, FAILED]


def test_a_client_that_ends_while_submitting_leaves_a_failed_job(home: Path) -> None:
    code = """
import os, signal, subprocess
subprocess.Popen = lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)
local.submit(shell("one", "true"))
"""
    with client(home, code) as process:
        assert process.wait() == -signal.SIGKILL
    assert record(home, "one").status == CREATED
    job = backend(home).get_job("one")
    assert (job.status, job.message) == (FAILED, "whoever submitted it ended before it had a supervisor")


def test_deleting_ends_all_processes(local: LocalBackend, home: Path, tmp_path: Path) -> None:
    place = tmp_path / "processes"
    place.mkdir()
    local.submit(shell("one", stubborn(place)))
    processes = numbers(place)
    minded = record(home, "one")
    local.delete_job("one")
    assert [pid for pid in [*processes, minded.supervisor or 0, minded.warden or 0] if not gone(pid)] == []
    assert local.list_jobs() == []
    assert list((home / "jobs").iterdir()) == []


def test_a_deletion_that_was_cut_short_is_finished_by_whoever_comes_next(local: LocalBackend, home: Path) -> None:
    local.submit(shell("one", "true"))
    ended(local, "one")
    store = JobStore(home)
    until(lambda: gone(record(home, "one").warden or 0))
    store.wish(record(home, "one").uid, "delete")
    assert backend(home).list_jobs() == []
    assert list((home / "jobs").iterdir()) == []


def test_fifty_jobs_from_five_processes_all_end_each_once(home: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ran.mkdir()
    code = """
for number in range(10):
    name = f"job-{sys.argv[2]}-{number}"
    local.submit(shell(name, f"mkdir {sys.argv[3]}/{name}"))
"""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(client(home, f"sys.argv[2:] = ['{number}', {str(ran)!r}]\n{code}"))
            for number in range(5)
        ]
        assert [process.wait() for process in clients] == [0] * 5
    local = backend(home)
    until(lambda: all(job.status in (COMPLETE, FAILED) for job in local.list_jobs()))
    jobs = local.list_jobs()
    assert [job.status for job in jobs] == [COMPLETE] * 50
    names = sorted(f"job-{client}-{number}" for client in range(5) for number in range(10))
    assert sorted(job.name for job in jobs) == names
    assert sorted(path.name for path in ran.iterdir()) == names  # mkdir fails the second time
    steps = [job.steps[0] for job in jobs]
    moments = sorted([(step.started, 1) for step in steps] + [(step.ended, -1) for step in steps])  # type: ignore[list-item,operator,type-var]
    together = most = 0
    for _, change in moments:
        together += change
        most = max(most, together)
    assert most <= 4
