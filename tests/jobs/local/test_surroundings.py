"""What a job's processes see, and nobody else: environments, secrets, packages, devices; and what is refused."""

from __future__ import annotations

import json
import os
import stat
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import UserError
from luthier.jobs.backends.local import LocalBackend
from luthier.jobs.backends.local_steps import devices_of
from luthier.jobs.options import LocalBackendConfig
from luthier.jobs.spec import Function, JobSpec, Transfer
from luthier.jobs.store import JobStore
from luthier.jobs.types import COMPLETE, Runtime
from tests.jobs.local.world import Gate, ended, log, record, shell, until

SECRET = "hf_0123456789abcdef"


def environment(local: LocalBackend, name: str) -> dict[str, str]:
    """What the first node saw."""
    ended(local, name)
    return json.loads(log(local, name)[-1])


def speaks(name: str, **more: Any) -> JobSpec:
    """A job that prints its environment as JSON."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    return JobSpec(name, "test", "torch", nproc_per_node=1, command=(sys.executable, "-c", code), **more)


def test_nodes_see_a_small_environment_and_their_own(
    local: LocalBackend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"HF_ENDPOINT": "http://localhost:1", "https_proxy": "http://p", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    for name, value in {**kept, "AWS_SECRET_ACCESS_KEY": SECRET, "EDITOR": "vi", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    local.submit(speaks("one", env={"MINE": "text with = and ' in it", "LANG": "C", "EMPTY": ""}, num_nodes=2))
    seen = environment(local, "one")
    assert {name: seen[name] for name in (*kept, "MINE", "EMPTY")} == {
        **kept, "LANG": "C", "MINE": "text with = and ' in it", "EMPTY": "",
    }  # fmt: skip
    assert {name: seen[name] for name in ("PATH", "HOME")} == {name: os.environ[name] for name in ("PATH", "HOME")}
    assert not seen.keys() & {"AWS_SECRET_ACCESS_KEY", "EDITOR", "RANK"}
    assert Path(seen["LUTHIER_WORKSPACE"]) == JobStore(home).directory(record(home, "one")) / "workspace"
    met = {name: seen[f"PET_{name}"] for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR")}
    assert met == {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    other = json.loads(log(local, "one", "node-1")[-1])
    assert (other["PET_NODE_RANK"], other["PET_MASTER_PORT"]) == ("1", seen["PET_MASTER_PORT"])


def test_nodes_inherit_the_environment_when_asked_to(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "vi")
    local.submit(speaks("one", env={"MINE": "1"}, inherit_environment=True))
    seen = environment(local, "one")
    assert (seen["EDITOR"], seen["MINE"]) == ("vi", "1")


def test_secrets_are_seen_by_their_step_alone(local: LocalBackend, home: Path, gate: Gate, tmp_path: Path) -> None:
    """The step of the secrets is an exporter, which comes to its turn after the processes have been looked at."""
    target = Transfer({"STORAGE_URI": f"file://{tmp_path}/out"}, {"ACCESS_TOKEN": SECRET})
    code = f"env; {gate.hold}"
    spec = replace(shell("one", code, env={"WANDB_API_KEY": f"key-{SECRET}"}), exporter=target)
    local.submit(spec)
    until(lambda: log(local, "one"))
    assert "ACCESS_TOKEN" not in "\n".join(log(local, "one"))
    job = record(home, "one")
    for pid in (job.warden, job.supervisor):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    (JobStore(home).directory(job) / "logs" / "node-0.txt").write_text("")  # it printed the key that is its own
    assert SECRET not in repr(local.get_job("one"))
    written = [path for path in home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
    gate.open()
    ended(local, "one")
    assert SECRET not in "".join(log(local, "one", "exporter"))
    assert SECRET not in json.dumps(local.as_object(replace(spec, name="two", env={})))


def test_what_is_kept_is_its_owners_alone(local: LocalBackend, home: Path) -> None:
    local.submit(shell("one", "true"))
    ended(local, "one")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home, home / "jobs", home / "jobs.sqlite3")}
    assert modes == {"home": 0o700, "jobs": 0o700, "jobs.sqlite3": 0o600}


def index(place: Path, name: str) -> str:
    """A package index on the disk with one wheel of a package; its address."""
    wheel = place / name.replace("_", "-") / f"{name}-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "WORD = 'found'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return place.as_uri()


def test_packages_are_installed_for_the_job_alone(local: LocalBackend, tmp_path: Path) -> None:
    """It sees what Luthier's own environment has as well."""
    source = """
def train():
    import sys
    import luthier_test_package, luthier, psutil
    print(luthier_test_package.WORD, sys.prefix)
"""
    function = Function(
        source, "train", {}, ("luthier-test-package==1.0",), (index(tmp_path / "index", "luthier_test_package"),)
    )
    local.submit(JobSpec("one", "test", "torch", nproc_per_node=1, function=function))
    job = ended(local, "one")
    assert job.status == COMPLETE, job.message
    word, place = log(local, "one")[-1].split()
    assert word == "found"
    assert place.endswith(".luthier/node-0/venv")
    assert "luthier-test-package" not in [name.lower() for name in local.get_runtime_packages(Runtime("test"))]


def test_a_package_that_is_not_there_fails_the_job(local: LocalBackend, tmp_path: Path) -> None:
    function = Function("def train(): pass", "train", {}, ("luthier-no-such-package",), (tmp_path.as_uri(),))
    local.submit(JobSpec("one", "test", "torch", nproc_per_node=1, function=function))
    job = ended(local, "one")
    assert "No matching distribution found for luthier-no-such-package" in job.message


GPUS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("nodes", "processes", "asked", "visible", "given"),
    [
        (1, "auto", None, [], [[]]),
        (1, "auto", None, GPUS, [GPUS]),
        (1, 2, None, GPUS, [GPUS]),
        (1, "auto", {"gpu": 1}, GPUS, [["0"]]),
        (2, "auto", None, GPUS, [["0", "1"], ["2", "3"]]),
        (2, 1, None, GPUS, [["0"], ["1"]]),
        (3, "auto", None, GPUS, [["0"], ["1"], ["2"]]),
        (2, "auto", {"nvidia.com/gpu": "2", "cpu": 4}, GPUS, [["0", "1"], ["2", "3"]]),
        (2, "auto", {"gpu": 0}, GPUS, [[], []]),
        (2, 2, {"cpu": 4}, [], [[], []]),
    ],
)
def test_each_node_sees_gpus_of_its_own(
    nodes: int, processes: Any, asked: dict[str, Any] | None, visible: list[str], given: list[list[str]]
) -> None:
    spec = JobSpec("one", "test", "torch", nodes, processes, command=("true",), resources_per_node=asked)
    assert devices_of(spec, visible) == given


def test_more_nodes_than_gpus_are_refused() -> None:
    spec = shell("one", "true", num_nodes=2)
    for processes in (1, "auto"):
        with pytest.raises(UserError, match=r"^num_nodes: 2 x 1 GPUs are needed, and this machine has one GPU"):
            devices_of(replace(spec, nproc_per_node=processes), ["0"])


def test_a_node_that_asks_for_no_gpu_sees_none(local: LocalBackend) -> None:
    spec = shell("one", "true", num_nodes=2)
    shown = [step["environment"].get("CUDA_VISIBLE_DEVICES") for step in local.as_object(spec)]
    hidden = local.as_object(replace(spec, resources_per_node={"gpu": 0}))
    assert [step["environment"]["CUDA_VISIBLE_DEVICES"] for step in hidden] == ["", ""]
    assert "" not in shown


def test_what_one_machine_does_not_have_is_refused(local: LocalBackend, home: Path, tmp_path: Path) -> None:
    spec = shell("one", "true")
    refused = {
        "image: jobs of this machine run in no container; leave it out, or submit to Kubernetes": replace(
            spec, image="python:3.12"
        ),
        "runtime_patches: jobs of this machine have no pods to patch; leave it out, or submit to Kubernetes": replace(
            spec, runtime_patches=({},)
        ),
        "resources_per_node.gpu: 2 x 64 GPUs are needed, and this machine has no GPU; ask for fewer; "
        'resources_per_node={"gpu": 0} trains on the CPU': replace(
            spec, resources_per_node={"gpu": 64}, num_nodes=2, env={"CUDA_VISIBLE_DEVICES": ""}
        ),
    }
    for message, wrong in refused.items():
        with pytest.raises(UserError) as error:
            local.submit(wrong)
        assert str(error.value) == message
    assert local.list_jobs() == []
    assert list((home / "jobs").iterdir()) == []
    with pytest.raises(UserError, match=r"^max_running_jobs: 0 is less than 1; let one run$"):
        LocalBackend(LocalBackendConfig(home=home, max_running_jobs=0))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/home: cannot be used \(Not a directory\); set LUTHIER_HOME to"):
        LocalBackend(LocalBackendConfig(home=tmp_path / "file" / "home"))


def test_what_would_run_can_be_looked_at(local: LocalBackend) -> None:
    model = Transfer({"STORAGE_URI": "hf://a/b"}, {"ACCESS_TOKEN": SECRET})
    function = Function("def f(): pass", "f", {}, ("x",), (f"https://me:{SECRET}@index",))
    spec = JobSpec("one", "test", "torch", 2, 3, function=function, model=model, env={"A": SECRET})
    steps = local.as_object(spec)
    assert [step["step"] for step in steps] == ["model-initializer", "node-0", "node-1"]
    assert [step["command"][1:] for step in steps] == [
        ["-m", "luthier.jobs.initializers", "model"], ["-m", "luthier.jobs.node"], ["-m", "luthier.jobs.node"],
    ]  # fmt: skip
    assert steps[0]["environment"]["ACCESS_TOKEN"] == "(secret)"
    assert steps[0]["environment"]["STORAGE_URI"] == "hf://a/b"
    assert steps[2]["environment"].items() >= {"A": "(secret)", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "3"}.items()
    assert SECRET not in json.dumps(steps)
    assert local.list_jobs() == []
