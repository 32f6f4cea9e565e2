"""One contract, every backend: the same cases, the same answers, errors to the letter.

A case is a function of a client that gives plain data, and the answer stands beside it. Jobs are real: processes of
this machine, or of stand-ins for Slurm and for a cluster (`slurm/played.py`, `kubernetes/cluster.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import UserError
from luthier.jobs import LocalBackendConfig, SlurmBackendConfig, TrainerClient
from luthier.jobs.spec import JobSpec, Transfer
from luthier.jobs.types import TrainJob
from tests.jobs.slurm.played_cluster import played_slurm

Case = Callable[[TrainerClient], Any]
CASES: list[tuple[Case, Any]] = []


def answers(expected: Any) -> Callable[[Case], Case]:
    """Adds a case to the table."""

    def add(case: Case) -> Case:
        CASES.append((case, expected))
        return case

    return add


@pytest.fixture(params=["local", "slurm"])
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    """A client of each backend, with no job yet; none outlives the test."""
    match request.param:
        case "local":
            made = TrainerClient(LocalBackendConfig(home=tmp_path / "home", max_running_jobs=4))
        case _:
            played_slurm(tmp_path, monkeypatch)
            made = TrainerClient(SlurmBackendConfig(home=tmp_path / "home"))
    yield made
    for job in made.list_jobs():
        made.delete_job(job.name)


# --- what cases share -------------------------------------------------------------------------------------------------

ROWS = Transfer({"STORAGE_URI": "file:///nowhere/at/all"})
FOREVER = "while :; do sleep 0.1; done"


def submit(client: TrainerClient, text: str = "exit 0", name: str = "job", **more: Any) -> None:
    command = ("sh", "-c", text)
    client.backend.submit(JobSpec(name, "torch-distributed", "torch", command=command, nproc_per_node=1, **more))


def wait(client: TrainerClient, *statuses: str, name: str = "job") -> TrainJob:
    return client.wait_for_job_status(name, set(statuses) or {"Complete", "Failed"}, timeout=120, polling_interval=0.05)


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        work()
    return str(caught.value)


# --- the cases --------------------------------------------------------------------------------------------------------


@answers(True)
def runtimes_are_those_of_the_catalogue(client: TrainerClient) -> bool:
    names = [runtime.name for runtime in client.list_runtimes()]
    return names == sorted(names) and {"luthier", "luthier-qwen2.5-0.5b", "torch-distributed"} <= set(names)


@answers(("luthier-llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "BuiltinTrainer"))
def a_runtime_is_found_by_the_keps_name(client: TrainerClient) -> Any:
    found = client.get_runtime("torchtune-llama3.2-1b")
    return found.name, found.pretrained_model, str(found.trainer_type)


@answers('runtime: there is no runtime "luthier-qwen2.5-0.6b"; did you mean luthier-qwen2.5-0.5b?')
def an_unknown_runtime_is_refused(client: TrainerClient) -> str:
    return refused(lambda: client.get_runtime("luthier-qwen2.5-0.6b"))


@answers(("Complete", "", [("node-0", "Complete", 0)], 1, "torch-distributed"))
def a_job_completes(client: TrainerClient) -> Any:
    submit(client)
    job = wait(client)
    steps = [(step.name, step.status, step.exit_code) for step in job.steps]
    return job.status, job.message, steps, job.num_nodes, job.runtime.name


@answers(["one", "", "  three  ", "four"])
def its_log_is_given_line_by_line(client: TrainerClient) -> list[str]:
    submit(client, "printf 'one\\n\\n  three  \\r\\nfour'")
    wait(client)
    return list(client.get_job_logs("job"))


@answers(["out", "err"])
def both_streams_are_in_it(client: TrainerClient) -> list[str]:
    submit(client, "echo out; echo err >&2")
    wait(client)
    return list(client.get_job_logs("job"))


@answers((["begun", "done"], "Complete"))
def it_can_be_followed_to_the_end(client: TrainerClient) -> Any:
    submit(client, "echo begun; sleep 0.2; echo done")
    lines = list(client.get_job_logs("job", follow=True))
    return lines, wait(client).status


@answers([["node 0 of 2"], ["node 1 of 2"]])
def each_node_has_its_number_and_log(client: TrainerClient) -> list[list[str]]:
    submit(client, "echo node $PET_NODE_RANK of $PET_NNODES", num_nodes=2)
    wait(client)
    return [list(client.get_job_logs("job", f"node-{number}")) for number in range(2)]


@answers(["mine, yours"])
def nodes_have_their_environment(client: TrainerClient) -> list[str]:
    submit(client, 'echo "$WHOSE"', env={"WHOSE": "mine, yours"})
    wait(client)
    return list(client.get_job_logs("job"))


@answers(["# laid"])
def files_are_laid_before_nodes_start(client: TrainerClient) -> list[str]:
    submit(client, "cat formats/own.py", files={"formats/own.py": "# laid\n"})
    wait(client)
    return list(client.get_job_logs("job"))


@answers(("Failed", [("node-0", "Failed", 3)], "no such thing"))
def a_job_that_fails_says_why(client: TrainerClient) -> Any:
    submit(client, "echo no such thing; exit 3")
    job = wait(client)
    assert job.message.startswith("node-0 left with exit code 3")
    return job.status, [(step.name, step.status, step.exit_code) for step in job.steps], job.message.splitlines()[-1]


@answers(("Failed", "node-0 left with exit code 137", [("node-0", "Failed", 137)]))
def a_job_that_is_killed_says_by_what(client: TrainerClient) -> Any:
    submit(client, "kill -KILL $$")
    job = wait(client)
    return job.status, job.message, [(step.name, step.status, step.exit_code) for step in job.steps]


@answers(True)
def waiting_for_it_raises_with_its_last_lines(client: TrainerClient) -> bool:
    submit(client, "echo no such thing; exit 3")
    told = refused(lambda: wait(client, "Complete"))
    return told.startswith("job: has failed: node-0 left with exit code 3") and told.endswith("no such thing")


@answers(("Failed", [("dataset-initializer", "Failed"), ("node-0", "Created")]))
def nodes_do_not_start_without_their_data(client: TrainerClient) -> Any:
    submit(client, "echo never", dataset=ROWS)
    job = wait(client)
    assert "/nowhere/at/all" in job.message
    assert list(client.get_job_logs("job")) == []
    return job.status, [(step.name, step.status) for step in job.steps]


@answers("ran longer than its active_deadline_seconds of 1")
def a_deadline_ends_it(client: TrainerClient) -> str:
    submit(client, FOREVER, active_deadline_seconds=1)
    return wait(client, "Failed").message


@answers("job: there is a job of this name already; delete it, or choose another name")
def a_name_is_taken_once(client: TrainerClient) -> str:
    submit(client)
    return refused(lambda: submit(client))


@answers(["Complete", "Complete"])
def a_deleted_name_is_free_again(client: TrainerClient) -> list[str]:
    seen = []
    for _ in range(2):
        submit(client)
        seen.append(wait(client).status)
        client.delete_job("job")
    return seen


@answers(6 * ["other: there is no job of this name; list_jobs() has the names of all"])
def an_unknown_job_is_refused(client: TrainerClient) -> list[str]:
    calls = [client.get_job, client.get_job_logs, client.get_job_events]
    calls += [client.suspend_job, client.resume_job, client.delete_job]
    return [refused(lambda call=call: call("other")) for call in calls]  # type: ignore[misc]


@answers('job: has no step "node-1"; it has node-0')
def an_unknown_step_is_refused(client: TrainerClient) -> str:
    submit(client)
    return refused(lambda: client.get_job_logs("job", "node-1"))


@answers("status: Done is not a status; there are Created, Running, Complete, Failed, Suspended")
def an_unknown_status_is_refused(client: TrainerClient) -> str:
    submit(client)
    return refused(lambda: wait(client, "Done"))


@answers("job: has ended as Complete, and will not be Suspended")
def what_cannot_come_any_more_is_not_waited_for(client: TrainerClient) -> str:
    submit(client)
    wait(client)
    return refused(lambda: wait(client, "Suspended"))


@answers(("Running", [("node-0", "Running")]))
def a_running_job_can_be_deleted(client: TrainerClient) -> Any:
    submit(client, f"echo begun; {FOREVER}")
    next(client.get_job_logs("job", follow=True))
    job = wait(client, "Running")
    client.delete_job("job")
    assert client.list_jobs() == []
    return job.status, [(step.name, step.status) for step in job.steps]


@answers((["first", "second", "third"], []))
def jobs_are_listed_the_oldest_first(client: TrainerClient) -> Any:
    for name in ("first", "second", "third"):
        submit(client, name=name)
        wait(client, name=name)
    return [job.name for job in client.list_jobs()], client.list_jobs(runtime="luthier")


@answers(["Submitted", "Running", "Started", "Complete", "Complete"])
def what_happened_is_told_in_order(client: TrainerClient) -> list[str]:
    submit(client)
    wait(client)
    events = client.get_job_events("job")
    assert [event.event_time for event in events] == sorted(event.event_time for event in events)
    return [event.reason for event in events]


@answers(("Suspended", "Complete"))
def it_can_be_suspended_and_go_on(client: TrainerClient) -> Any:
    submit(client, f"test -e begun && exit 0; touch begun; echo begun; {FOREVER}")
    next(client.get_job_logs("job", follow=True))
    client.suspend_job("job")
    suspended = wait(client, "Suspended").status
    client.resume_job("job")
    return suspended, wait(client).status


@answers((False, True))
def secrets_are_in_no_description(client: TrainerClient) -> Any:
    spec = JobSpec(
        name="job", runtime="torch-distributed", framework="torch", command=("true",), nproc_per_node=1,
        dataset=Transfer({"STORAGE_URI": "hf://a/b"}, {"ACCESS_TOKEN": "hf_hidden"}),
    )  # fmt: skip
    told = json.dumps(client.backend.as_object(spec), default=str) + repr(spec)
    return "hf_hidden" in told, "hf://a/b" in told or "luthier.jobs.initializers" in told


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_every_backend_answers_the_same(case: Case, expected: Any, client: TrainerClient) -> None:
    assert case(client) == expected
