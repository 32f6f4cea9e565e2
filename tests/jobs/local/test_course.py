"""How a job goes: its steps, logs, events, queue, suspension, end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from luthier.errors import UserError
from luthier.jobs.backends.local import LocalBackend
from luthier.jobs.spec import Function, JobSpec, Transfer
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED
from tests.jobs.local.world import Gate, backend, ended, log, record, shell, until


def statuses(local: LocalBackend, *names: str) -> list[str]:
    return [local.get_job(name).status for name in names]


def test_a_job_leaves_its_log_its_files_and_when_what_happened(local: LocalBackend, home: Path) -> None:
    local.submit(shell("one", "echo hello; echo there >&2; echo 7 > result"))
    job = ended(local, "one")
    assert (job.name, job.status, job.message, job.num_nodes) == ("one", COMPLETE, "", 1)
    assert log(local, "one") == ["hello", "there"]
    [step] = job.steps
    assert (step.name, step.status, step.exit_code, step.device) == ("node-0", COMPLETE, 0, "cpu")
    assert job.creation_timestamp <= time_of(step.started) <= time_of(step.ended)
    assert [event.reason for event in local.get_job_events("one")] == [
        "Submitted", "Running", "Started", "Complete", "Complete",
    ]  # fmt: skip
    assert (home / "jobs" / f"one-{record(home, 'one').uid}" / "workspace" / "result").read_text() == "7\n"


def test_initializers_come_before_nodes(local: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "base" / name).write_text("{}")
    there = {name: Transfer({"STORAGE_URI": (tmp_path / name).as_uri()}) for name in ("data", "base", "nothing")}
    script = "cat dataset/rows.jsonl model/config.json"
    local.submit(shell("good", script, dataset=there["data"], model=there["base"], num_nodes=2))
    job = ended(local, "good")
    assert job.status == COMPLETE, job.message
    assert [(step.name, step.status) for step in job.steps] == [
        ("dataset-initializer", COMPLETE), ("model-initializer", COMPLETE), ("node-0", COMPLETE), ("node-1", COMPLETE),
    ]  # fmt: skip
    data, model, *nodes = job.steps
    assert max(time_of(data.ended), time_of(model.ended)) <= min(time_of(node.started) for node in nodes)
    assert log(local, "good", "node-1") == ['{"text": "a"}', "{}"]
    local.submit(shell("bad", "true", dataset=there["nothing"]))
    job = ended(local, "bad")
    assert [(step.status, step.exit_code) for step in job.steps] == [(FAILED, 2), (CREATED, None)]
    assert "there is nothing there" in job.message


def time_of(moment: datetime | None) -> datetime:
    assert moment is not None
    return moment


def test_a_line_is_there_as_soon_as_it_is_written(local: LocalBackend, gate: Gate) -> None:
    local.submit(shell("one", f"echo first; {gate.hold}; printf second"))
    lines = local.get_job_logs("one", "node-0", follow=True)
    assert next(lines) == "first"  # the job waits at the gate, and only what comes next opens it
    assert local.get_job("one").status == RUNNING
    gate.open()
    assert list(lines) == ["second"]
    assert local.get_job("one").status == COMPLETE


def test_a_failure_says_why_and_ends_the_other_nodes(local: LocalBackend) -> None:
    script = 'if [ $PET_NODE_RANK = 0 ]; then exec sleep 600; fi; seq 1 30; echo "boom: no rows" >&2; exit 7'
    local.submit(shell("two", script, num_nodes=2))
    job = ended(local, "two")
    assert job.status == FAILED
    first, *lines = job.message.splitlines()
    assert first == "node-1 left with exit code 7:"
    assert lines[-2:] == ["30", "boom: no rows"]
    assert len(lines) < 30
    assert [(step.status, step.exit_code) for step in job.steps] == [(FAILED, 143), (FAILED, 7)]


def test_a_program_that_is_not_there_is_a_failure(local: LocalBackend) -> None:
    local.submit(JobSpec("none", "test", "torch", command=("no-such-program",)))
    job = ended(local, "none")
    assert (job.status, job.steps[0].exit_code) == (FAILED, 127)
    assert job.message.endswith("no-such-program cannot be started: No such file or directory")


def test_jobs_begin_in_the_order_in_which_they_came(home: Path, tmp_path: Path, gate: Gate) -> None:
    local = backend(home, running=1)
    order = tmp_path / "order"
    for name in ("a", "b", "c"):
        local.submit(shell(name, f"echo {name} >> {order}; {gate.hold}"))
    until(lambda: local.get_job("a").status == RUNNING)
    assert statuses(local, "b", "c") == [CREATED, CREATED]
    assert local.get_job("c").message == "waits for its turn: 1 running, 1 waiting before it"
    for name in ("a", "b", "c"):
        gate.open()
        assert ended(local, name).status == COMPLETE
    assert order.read_text().split() == ["a", "b", "c"]


def test_a_job_of_another_client_may_have_another_limit(home: Path, gate: Gate) -> None:
    backend(home, running=1).submit(shell("held", gate.hold))
    until(lambda: backend(home).get_job("held").status == RUNNING)
    local = backend(home, running=2)
    local.submit(shell("beside", "true"))
    assert ended(local, "beside").status == COMPLETE
    assert local.get_job("held").status == RUNNING
    gate.open()


def test_a_suspended_job_stops_and_goes_on(home: Path, tmp_path: Path) -> None:
    """Its process is told by SIGTERM, as `luthier train` is, which then saves; the next start finds what it saved."""
    local, start = backend(home, running=1), Gate(tmp_path / "start")
    script = f"""
        trap 'echo saving; touch saved; exit 143' TERM
        if [ -e saved ]; then echo going on; exit 0; fi
        echo beginning
        echo ready > {start.path}
        while true; do sleep 600 & wait $!; done
    """
    local.submit(shell("one", script))
    local.submit(shell("two", "true"))
    start.path.read_text()
    local.suspend_job("one")
    until(lambda: local.get_job("one").status == SUSPENDED)
    assert ended(local, "two").status == COMPLETE  # it does not stand in the way
    job = local.get_job("one")
    assert (job.status, job.message) == (SUSPENDED, "resume_job() lets it go on")
    assert job.steps[0].status == SUSPENDED
    local.resume_job("one")
    job = ended(local, "one")
    assert job.status == COMPLETE
    assert job.steps[0].exit_code == 0
    assert log(local, "one") == ["beginning", "saving", "going on"]
    reasons = [event.reason for event in local.get_job_events("one")]
    assert reasons[3:6] == ["Suspended", "Suspended", "Resumed"]  # the step, the job, the job


def test_a_job_that_waits_can_be_suspended_and_deleted(home: Path, gate: Gate) -> None:
    local = backend(home, running=1)
    local.submit(shell("first", gate.hold))
    for name in ("waits", "goes"):
        local.submit(shell(name, "true"))
    local.suspend_job("waits")
    until(lambda: local.get_job("waits").status == SUSPENDED)
    local.delete_job("goes")
    assert [job.name for job in local.list_jobs()] == ["first", "waits"]
    gate.open()
    assert ended(local, "first").status == COMPLETE
    assert local.get_job("waits").status == SUSPENDED
    local.resume_job("waits")
    assert ended(local, "waits").status == COMPLETE
    with pytest.raises(UserError, match=r"^waits: has ended \(Complete\); submit it under another name$"):
        local.suspend_job("waits")


def test_a_job_that_runs_too_long_fails(local: LocalBackend) -> None:
    local.submit(shell("slow", "exec sleep 600", active_deadline_seconds=1))
    job = ended(local, "slow")
    assert (job.status, job.message) == (FAILED, "ran longer than its active_deadline_seconds of 1")


def test_what_a_job_leaves_in_the_background_ends_with_it(local: LocalBackend, tmp_path: Path) -> None:
    from tests.jobs.local.world import gone

    local.submit(shell("one", f"sleep 600 & echo $! > {tmp_path}/pid"))
    assert ended(local, "one").status == COMPLETE
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_name_can_be_used_once_at_a_time(local: LocalBackend, home: Path) -> None:
    local.submit(shell("one", "echo 1"))
    with pytest.raises(UserError, match=r"^one: there is a job of this name already; delete it, or choose another"):
        local.submit(shell("one", "echo 2"))
    ended(local, "one")
    assert log(local, "one") == ["1"]
    local.delete_job("one")
    local.submit(shell("one", "echo 2"))
    ended(local, "one")
    assert log(local, "one") == ["2"]
    assert len(list((home / "jobs").iterdir())) == 1


@pytest.mark.parametrize("name", ["get_job", "delete_job", "suspend_job", "get_job_events"])
def test_a_job_that_is_not_there(local: LocalBackend, name: str) -> None:
    with pytest.raises(UserError, match=r"^none: there is no job of this name; list_jobs\(\) has the names of all$"):
        getattr(local, name)("none")


def test_a_step_that_is_not_there(local: LocalBackend) -> None:
    local.submit(shell("two", "true", num_nodes=2))
    with pytest.raises(UserError, match=r'^two: has no step "node-2"; it has node-0, node-1$'):
        local.get_job_logs("two", "node-2", follow=False)
    assert ended(local, "two").status == COMPLETE


def test_files_are_laid_into_the_workspace(local: LocalBackend) -> None:
    local.submit(shell("one", "cat own/template.jinja", files={"own/template.jinja": "{{ messages }}\n"}))
    assert ended(local, "one").status == COMPLETE
    assert log(local, "one") == ["{{ messages }}"]


SOURCE = """
def train(rows, name, keep=True):
    import os
    print(f"{rows!r} {name!r} {keep!r} rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    if not keep:
        raise ValueError("nothing was kept")
"""


@pytest.mark.parametrize(("keep", "code"), [(True, 0), (False, 1)])
def test_a_function_gets_its_arguments_by_name(local: LocalBackend, keep: bool, code: int) -> None:
    args = {"rows": [1, 2.5, None], "name": "null: [1]", "keep": keep}
    local.submit(JobSpec("fun", "test", "torch", nproc_per_node=1, function=Function(SOURCE, "train", args)))
    job = ended(local, "fun")
    assert log(local, "fun")[0] == f"[1, 2.5, None] 'null: [1]' {keep} rank 0 of 1"
    assert (job.status, job.steps[0].exit_code) == (COMPLETE if keep else FAILED, code)
    if not keep:
        ends: Sequence[str] = job.message.splitlines()[-2:]
        assert ends == ["ValueError: nothing was kept", "rank 0 left with exit code 1"]
