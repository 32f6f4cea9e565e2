"""Jobs through Slurm, against small stand-ins of its commands that behave as their manual pages say (`played.py`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import UserError
from luthier.jobs.backends.slurm import SlurmBackend
from luthier.jobs.backends.slurm_step import VARIABLE, environment_of
from luthier.jobs.options import SlurmBackendConfig
from luthier.jobs.spec import JobSpec, Transfer
from tests.jobs.slurm.played_cluster import played_slurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-ins' directory; they are first on PATH. No job outlives the test."""
    cluster = played_slurm(tmp_path, monkeypatch)
    yield cluster
    for job in (cluster / "jobs").glob("*.json"):
        (cluster / f"{job.stem}.befall").write_text("CANCELLED")


@pytest.fixture
def backend(slurm: Path, tmp_path: Path) -> SlurmBackend:
    return SlurmBackend(SlurmBackendConfig(home=tmp_path / "a home of 100% jobs"))


def shell(text: str, name: str = "job", **more: Any) -> JobSpec:
    return JobSpec(name, "torch-distributed", "torch", command=("bash", "-c", text), nproc_per_node=1, **more)


def ended(backend: SlurmBackend, name: str = "job", step: str = "node-0") -> list[str]:
    """Wait until a job has ended; the lines of a step."""
    return list(backend.get_job_logs(name, step, follow=True))


def until(backend: SlurmBackend, status: str, name: str = "job") -> Any:
    while (job := backend.get_job(name)).status != status:
        assert job.status not in ("Complete", "Failed"), job.message
    return job


def test_a_job_takes_its_course(backend: SlurmBackend) -> None:
    backend.submit(shell("echo node $PET_NODE_RANK of $PET_NNODES, $PET_NPROC_PER_NODE each; pwd", num_nodes=2))
    assert ended(backend)[0] == "node 0 of 2, 1 each"
    first, place = ended(backend, step="node-1")
    assert first == "node 1 of 2, 1 each"
    assert place.endswith("/a home of 100% jobs/slurm/job/workspace")
    job = backend.get_job("job")
    assert (job.status, job.message, job.num_nodes) == ("Complete", "", 2)
    assert [(step.name, step.status, step.exit_code) for step in job.steps] == [
        ("node-0", "Complete", 0),
        ("node-1", "Complete", 0),
    ]
    assert job.creation_timestamp <= job.steps[0].started <= job.steps[0].ended
    told = [(event.involved_object_name, event.reason) for event in backend.get_job_events("job")]
    of_job = [("job", reason) for reason in ("Submitted", "Running", "Complete")]
    assert told == [*of_job[:2], ("job-node", "Started"), ("job-node", "Complete"), of_job[2]]
    assert [listed.name for listed in backend.list_jobs()] == ["job"]


def test_it_waits_for_its_turn(backend: SlurmBackend, slurm: Path) -> None:
    (slurm / "gate").touch()
    backend.submit(shell("echo done"))
    while not (job := backend.get_job("job")).message.endswith("Resources"):
        pass
    assert (job.status, job.message) == ("Created", "waits in the queue: Resources")
    (slurm / "gate").unlink()
    assert ended(backend) == ["done"]
    assert backend.get_job("job").status == "Complete"


def test_the_step_that_failed_is_told_with_its_last_lines(backend: SlurmBackend) -> None:
    backend.submit(shell("echo no such thing; exit 3"))
    ended(backend)
    job = backend.get_job("job")
    assert (job.status, job.message) == ("Failed", "node-0 left with exit code 3:\nno such thing")
    assert job.steps[0].exit_code == 3


def test_of_several_nodes_the_one_that_failed_is_told(backend: SlurmBackend) -> None:
    text = "if test $PET_NODE_RANK = 1; then echo broken; exit 3; fi; while :; do sleep 0.1; done"
    backend.submit(shell(text, num_nodes=2))
    ended(backend)
    job = backend.get_job("job")
    assert (job.status, job.message) == ("Failed", "node-1 left with exit code 3:\nbroken")
    assert [step.status for step in job.steps] == ["Failed", "Failed"]
    assert job.steps[1].exit_code == 3


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("TIMEOUT", "ran into its time limit"),
        ("OUT_OF_MEMORY", "took more memory than it had asked for"),
        ("NODE_FAIL", "lost a node"),
        ("CANCELLED", "was cancelled"),
    ],
)
def test_what_slurm_ends_says_why(state: str, why: str, backend: SlurmBackend, slurm: Path) -> None:
    backend.submit(shell("echo begun; exec sleep 600"))
    lines = backend.get_job_logs("job", "node-0", follow=True)
    assert next(lines) == "begun"
    assert backend.get_job("job").status == "Running"
    (slurm / "101.befall").write_text(state)
    assert list(lines) == []
    job = backend.get_job("job")
    assert (job.status, job.message, job.steps[0].status) == ("Failed", why, "Failed")


@pytest.mark.parametrize(("code", "status"), [(0, "Complete"), (1, "Failed")])
def test_without_accounting_the_script_has_the_last_word(
    code: int, status: str, backend: SlurmBackend, slurm: Path
) -> None:
    (slurm / "no-accounting").touch()
    (slurm / "forgetful").touch()
    backend.submit(shell(f"exit {code}"))
    ended(backend)
    assert backend.get_job("job").status == status


def test_what_slurm_has_forgotten_is_known_all_the_same(backend: SlurmBackend, slurm: Path) -> None:
    backend.submit(shell("exit 0"))
    ended(backend)
    (slurm / "jobs" / "101.json").unlink()
    assert SlurmBackend(SlurmBackendConfig(home=Path(backend._home).parent)).get_job("job").status == "Complete"


def test_a_job_that_left_no_word_has_failed(backend: SlurmBackend, slurm: Path) -> None:
    (slurm / "gate").touch()
    backend.submit(shell("exit 0"))
    (slurm / "101.befall").write_text("CANCELLED")
    while json.loads((slurm / "jobs" / "101.json").read_text())["state"] != "CANCELLED":
        pass
    (slurm / "jobs" / "101.json").unlink()
    job = backend.get_job("job")
    assert (job.status, job.message) == (
        "Failed",
        "Slurm knows it no more, and its script left no word: it was cancelled, or its node was lost",
    )


def test_a_preempted_job_starts_again(backend: SlurmBackend, slurm: Path) -> None:
    """Its node is asked to stop first, and has time to save."""
    text = "if test -e saved; then echo goes on; exit 0; fi; trap 'touch saved; exit 143' TERM; echo begun; "
    backend.submit(shell(text + "while :; do sleep 0.05; done"))
    lines = backend.get_job_logs("job", "node-0", follow=True)
    assert next(lines) == "begun"
    (slurm / "101.befall").write_text("PREEMPTED")
    assert list(lines)[-1] == "goes on"  # bash tells before that its `sleep` was stopped too
    assert backend.get_job("job").status == "Complete"
    told = [(event.reason, event.message) for event in backend.get_job_events("job")]
    assert told[2:7] == [
        ("Started", "task of srun"),
        ("Failed", "exit code 143"),
        ("Running", "its turn has come (restart 1)"),
        ("Started", "task of srun (restart 1)"),
        ("Complete", "exit code 0 (restart 1)"),
    ]


def test_a_job_can_be_held_and_let_go(backend: SlurmBackend) -> None:
    backend.submit(shell("test -e ready && exit 0; touch ready; echo begun; trap 'exit 143' TERM; sleep 600 & wait"))
    lines = backend.get_job_logs("job", "node-0", follow=True)
    assert next(lines) == "begun"
    backend.suspend_job("job")
    job = until(backend, "Suspended")
    assert job.message == "resume_job() lets it go on"
    backend.resume_job("job")
    assert list(lines) == []
    assert backend.get_job("job").status == "Complete"
    with pytest.raises(UserError, match=re.escape("job: has ended (Complete); submit it under another name")):
        backend.suspend_job("job")


def test_a_job_that_waits_can_be_held_and_let_go(backend: SlurmBackend, slurm: Path) -> None:
    (slurm / "gate").touch()
    backend.submit(shell("echo done"))
    backend.suspend_job("job")
    until(backend, "Suspended")
    (slurm / "gate").unlink()
    backend.resume_job("job")
    assert ended(backend) == ["done"]


def test_deleting_ends_its_processes(backend: SlurmBackend, tmp_path: Path) -> None:
    backend.submit(shell(f"echo $$ > '{tmp_path}/pid'; echo begun; exec sleep 600"))
    assert next(backend.get_job_logs("job", "node-0", follow=True)) == "begun"
    backend.delete_job("job")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    with pytest.raises(UserError, match=r"job: there is no job of this name; list_jobs\(\) has the names of all"):
        backend.get_job("job")
    assert list(backend._home.iterdir()) == []


def test_secrets_reach_their_step_alone(backend: SlurmBackend, slurm: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "rows.jsonl").write_text('{"text": "a"}\n')
    fetch = Transfer({"STORAGE_URI": f"file://{rows}"}, {"ACCESS_TOKEN": "hf_hidden"})
    backend.submit(shell("env; cat dataset/rows.jsonl", dataset=fetch, env={"PASSWORD": "also_hidden"}))
    said = ended(backend)
    assert backend.get_job("job").status == "Complete", backend.get_job("job").message
    assert said[-1] == '{"text": "a"}'
    assert "PASSWORD=also_hidden" in said
    assert not any("hf_hidden" in line or line.startswith(VARIABLE) for line in said)
    files = [path for path in backend._home.rglob("*") if path.is_file() and path.name != "node-0.txt"]
    assert len(files) > 5
    for path in files:
        assert "hidden" not in path.read_text(), path


def test_a_name_is_taken_once(backend: SlurmBackend) -> None:
    backend.submit(shell("exit 0"))
    with pytest.raises(UserError, match="job: there is a job of this name already; delete it, or choose another name"):
        backend.submit(shell("exit 0"))
    with pytest.raises(UserError, match=r'job: has no step "node-1"; it has node-0'):
        backend.get_job_logs("job", "node-1", follow=False)


def test_what_sbatch_refuses_is_no_job(backend: SlurmBackend, slurm: Path) -> None:
    (slurm / "refusal").write_text("Batch job submission failed: Invalid partition name specified")
    with pytest.raises(UserError, match=r"^sbatch: Batch job submission failed: Invalid partition name specified$"):
        backend.submit(shell("exit 0"))
    assert backend.list_jobs() == []


def test_without_slurm_there_is_a_remedy(backend: SlurmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"^sbatch: was not found; submit from a machine that has Slurm's commands"):
        backend.submit(shell("exit 0"))


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"image": "mine"}, "image: jobs of Slurm run in no container"),
        ({"inherit_environment": True}, "inherit_environment: jobs of Slurm have an environment of their own"),
        ({"runtime_patches": ({"manager": "a.b/c"},)}, "runtime_patches: jobs of Slurm have no pods to patch"),
        ({"resources_per_node": {"tpu": 1}}, "resources_per_node.tpu: Slurm has no word for it"),
        ({"resources_per_node": {"memory": "much"}}, 'resources_per_node.memory: "much" is no amount of memory'),
        ({"resources_per_node": {"cpu": "some"}}, 'resources_per_node.cpu: "some" is no amount of cpu'),
    ],
)
def test_what_slurm_cannot_do_is_refused(spec: dict[str, Any], error: str, backend: SlurmBackend) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(error)}"):
        backend.submit(shell("exit 0", **spec))
    assert backend.list_jobs() == []


def test_the_script_asks_for_what_the_job_needs(tmp_path: Path) -> None:
    config = SlurmBackendConfig(tmp_path, "gpus", "physics", "long", None, ("--exclusive", "--constraint=h100"))
    resources = {"gpu": 4, "cpu": "16", "memory": "64Gi"}
    spec = shell("exit", num_nodes=3, resources_per_node=resources, active_deadline_seconds=90)
    script = SlurmBackend(config).as_object(spec)
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert asked == [
        "--job-name=job",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f'--output="{tmp_path}/slurm/job/logs/batch.txt"',
        "--gpus-per-node=4",
        "--cpus-per-task=16",
        "--mem=65536M",
        "--partition=gpus",
        "--account=physics",
        "--qos=long",
        "--time=1:30",
        "--exclusive",
        "--constraint=h100",
    ]


@pytest.mark.parametrize(
    ("resources", "options"),
    [
        ({"cpu": "1500m"}, ["--cpus-per-task=2"]),
        ({"cpu": 0.5, "memory": 64_000_000_000}, ["--cpus-per-task=1", "--mem=61035M"]),
        ({"nvidia.com/gpu": "2", "memory": "1.5Ti"}, ["--gpus-per-node=2", "--mem=1572864M"]),
        ({"cpu": "1500m", "memory": "6.4e10"}, ["--cpus-per-task=2", "--mem=61035M"]),
        ({"gpu": "0", "memory": "1Ki"}, ["--gpus-per-node=0", "--mem=1M"]),
    ],
)
def test_quantities_of_kubernetes_are_slurms(resources: dict[str, Any], options: list[str], tmp_path: Path) -> None:
    script = SlurmBackend(SlurmBackendConfig(tmp_path)).as_object(shell("exit", resources_per_node=resources))
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert asked[6:] == options


def test_a_node_without_gpus_has_none(backend: SlurmBackend) -> None:
    backend.submit(shell("echo $PYTHONUNBUFFERED", resources_per_node={"gpu": "0"}))
    assert ended(backend) == ["1"]  # so that a log has each line at once
    [step] = backend.get_job("job").steps
    assert (step.device, step.device_count) == ("cpu", "1")


@pytest.mark.parametrize("home", ["plain", "with spaces, 100% 'quoted' and $HOME"])
def test_shellcheck_has_nothing_to_say(home: str, tmp_path: Path) -> None:
    fetch = Transfer({"STORAGE_URI": "hf://a/b"})
    spec = shell("echo 'it is' $HOME", dataset=fetch, model=fetch, exporter=fetch, num_nodes=2)
    path = tmp_path / "batch.sh"
    path.write_text(SlurmBackend(SlurmBackendConfig(tmp_path / home)).as_object(spec))
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_node_is_told_where_to_meet() -> None:
    """And no more that it is a rank, which srun makes of every task."""
    given = {"SLURM_JOB_ID": "40123", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NODEID": "2", "SLURM_PROCID": "2"}
    given |= {"SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "8", "PATH": "/bin"}
    steps = {"node": {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "3"}, "exporter": {"ACCESS_TOKEN": "hidden"}}
    own = environment_of("node", {**given, VARIABLE: json.dumps(steps)})
    assert {name: value for name, value in own.items() if name.startswith("PET_")} == {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "gpu07",
        "PET_MASTER_PORT": "10123",
    }
    assert own.keys() & {"SLURM_PROCID", "SLURM_NTASKS", "ACCESS_TOKEN", VARIABLE} == set()


def test_two_nodes_train_one_model(backend: SlurmBackend, tmp_path: Path) -> None:
    """The recipe on two nodes of one process each: a step's loss is that of both nodes' rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i} " * 5}) + "\n" for i in range(8)))
    config = {
        "model": "debug:llama",
        "data": {"train": str(rows), "sequence_length": 32},
        "train": {"steps": 2, "rows_per_step": 4, "precision": "fp32", "device": "cpu"},
        "output": "output",
    }
    spec = JobSpec("job", "luthier", "luthier", engine="luthier", config=config, num_nodes=2, nproc_per_node=1)
    backend.submit(spec)
    said = ended(backend)
    job = backend.get_job("job")
    assert job.status == "Complete", said
    assert job.trainer_status is not None
    assert job.trainer_status.progress_percentage == 100
    assert job.trainer_status.metrics["step"] == 2
    assert (backend._home / "job" / "workspace" / "output" / "export" / "config.json").is_file()
