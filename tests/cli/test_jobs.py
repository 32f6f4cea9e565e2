"""`luthier jobs` and the verbs of the catalogue."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from luthier.cli.main import main
from luthier.cli.runtimes import HEAD
from luthier.config import load_config
from luthier.jobs import TrainerClient
from luthier.jobs.spec import JobSpec


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUTHIER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def said(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    return capfd.readouterr().out


def told(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0):
    return json.loads(said(capfd, *words, "--json", code=code))


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_runtimes_are_listed_as_the_kep_has_them(capfd):
    head, *rows = said(capfd, "runtimes").splitlines()
    assert re.split(r"  +", head) == [*HEAD]
    row = next(row for row in rows if row.startswith("luthier-llama3.1-8b "))
    assert row.split() == [
        "luthier-llama3.1-8b",
        "builtin-trainer",
        "luthier",
        "meta-llama/Llama-3.1-8B-Instruct",
        "cpu",
        "1",
    ]
    assert next(row for row in rows if row.startswith("torch-")).split()[:4] == [
        *("torch-distributed", "custom-trainer", "torch", "<undefined>"),
    ]
    assert {runtime["name"] for runtime in told(capfd, "runtimes")["runtimes"]} == {row.split()[0] for row in rows}


def test_ls_shows_recipes_and_configs(capfd):
    lines = said(capfd, "ls", "llama3.2-1b").splitlines()
    assert [line.split() for line in lines] == [
        ["RECIPE", "CONFIG"],
        ["full_finetune_single_device", "llama3.2-1b/full_single_device"],
        ["full_finetune_distributed", "llama3.2-1b/full"],
        ["lora_finetune_single_device", "llama3.2-1b/lora_single_device"],
        ["lora_finetune_distributed", "llama3.2-1b/lora"],
    ]
    assert told(capfd, "ls", "no-such")["recipes"]["full_finetune_distributed"] == []


def test_what_cat_prints_is_a_run(capfd, tmp_path):
    text = said(capfd, "cat", "qwen2.5-72b/lora", "--gpus", "4")
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    assert config.model == "Qwen/Qwen2.5-72B-Instruct"
    assert (config.parallel.dp_shard, config.parallel.cp) == (2, 2)
    assert yaml.safe_load(told(capfd, "cat", "qwen2.5-72b/lora", "--gpus", "4")["text"]) == yaml.safe_load(text)


def test_cp_writes_what_cat_prints(capfd, tmp_path):
    text = said(capfd, "cat", "smollm2-135m")
    path = tmp_path / "mine" / "run.yaml"
    assert said(capfd, "cp", "smollm2-135m", str(path)) == f"wrote {path}\n"
    assert path.read_text() == text
    assert main(["cp", "smollm2-135m", str(path)]) == 2
    assert f"{path}: is there already; name another, or give --force" in capfd.readouterr().err
    assert main(["cp", "smollm2-360m", str(path), "--force"]) == 0
    assert "360M" in path.read_text()
    assert main(["cp", "qwen3-0.6b/lora", str(tmp_path)]) == 0
    assert (tmp_path / "qwen3-0.6b-lora.yaml").is_file()


def test_a_recipe_is_its_source(capfd, tmp_path):
    from luthier.recipes import sft

    assert said(capfd, "cat", "lora_finetune_distributed") == Path(sft.__file__).read_text()
    assert main(["cp", "lora_finetune_distributed", str(tmp_path)]) == 0
    assert (tmp_path / "lora_finetune_distributed.py").is_file()


def test_validate(capfd, tmp_path):
    (tmp_path / "run.yaml").write_text("model: debug:llama\ndata: rows.jsonl\nparallel: {tp: 2}\n")
    assert yaml.safe_load(said(capfd, "validate", "run.yaml", "--gpus", "4"))["parallel"]["tp"] == 2
    assert told(capfd, "validate", "run.yaml")["valid"] is True
    assert main(["validate", "run.yaml", "--gpus", "3"]) == 2
    assert "parallel.tp: tp 2 does not divide 3 processes" in capfd.readouterr().err
    assert main(["validate", "run.yaml", "train.stps=3"]) == 2
    assert "did you mean train.steps?" in capfd.readouterr().err


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_from_end_to_end(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "rows.jsonl").write_text('{"text": "plane the top"}\n{"text": "bend the ribs"}\n')
    assert said(capfd, "jobs", "list") == "there are no jobs\n"
    words = ["model=debug:llama", "data=rows.jsonl", "data.sequence_length=16", "train.steps=2", "train.precision=fp32"]
    lines = said(capfd, "jobs", "submit", *words, "--name", "first", "--watch").splitlines()
    assert lines[-1].startswith("first  Complete  100%, loss ")
    job = told(capfd, "jobs", "get", "first")
    assert (job["status"], job["runtime"], [step["name"] for step in job["steps"]]) == (
        "Complete",
        "luthier",
        ["node-0"],
    )
    assert job["progress"]["progress_percentage"] == 100
    assert "exit code 0" in said(capfd, "jobs", "get", "first", "--watch")
    assert [job["name"] for job in told(capfd, "jobs", "list")["jobs"]] == ["first"]
    assert said(capfd, "jobs", "list").splitlines()[1].split()[:3] == ["first", "luthier", "Complete"]
    log = said(capfd, "jobs", "logs", "first", "--follow")
    assert "2 of 2 steps" in log
    assert told(capfd, "jobs", "logs", "first")["lines"] == log.splitlines()
    assert said(capfd, "jobs", "wait", "first") == "first is Complete\n"
    events = told(capfd, "jobs", "events", "first")["events"]
    assert said(capfd, "jobs", "events", "first", "--watch").count("\n") == len(events) > 2
    assert main(["jobs", "submit", *words, "--name", "first"]) == 2
    assert "first" in capfd.readouterr().err
    assert told(capfd, "jobs", "delete", "first") == {"deleted": ["first"]}
    assert main(["jobs", "get", "first"]) == 2


def test_jobs_are_suspended_resumed_and_deleted(capfd, tmp_path):
    os.mkfifo(tmp_path / "gate")
    script = f"test -e begun && exit 0; touch begun; read line < {tmp_path}/gate"
    client = TrainerClient()
    for name in ("first", "second"):
        client.backend.submit(JobSpec(name, "torch-distributed", "torch", 1, 1, command=("sh", "-c", script)))
    assert said(capfd, "jobs", "suspend", "second", "first").splitlines()[0].startswith("second is asked to stop;")
    for name in ("first", "second"):
        assert said(capfd, "jobs", "wait", name, "--status", "Suspended") == f"{name} is Suspended\n"
    assert told(capfd, "jobs", "resume", "first") == {"resumed": ["first"]}
    assert said(capfd, "jobs", "wait", "first") == "first is Complete\n"
    assert main(["jobs", "suspend", "first", "second"]) == 2  # what has ended keeps nobody else from it
    assert "first: has ended (Complete)" in capfd.readouterr().err
    assert main(["jobs", "delete", "nobody", "first", "none", "second"]) == 2
    errors = capfd.readouterr().err
    assert "nobody: there is no job" in errors
    assert "none: there is no job" in errors
    assert said(capfd, "jobs", "list") == "there are no jobs\n"


def test_submit_shows_what_would_run(capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    places = ["--model", "hf://me/model", "--data", "s3://bucket/rows", "--export", "hf://me/tuned"]
    spec = told(
        *(capfd, "jobs", "submit", "--runtime", "luthier-qwen3-0.6b", "adapter.rank=4", "--dry-run", *places),
        *("--export-form", "adapter", "--nnodes", "2", "--nproc", "2"),
    )
    assert spec["config"]["adapter"] == {"kind": "lora", "rank": 4}
    assert spec["recipe"] == "lora_finetune_distributed"
    assert (spec["num_nodes"], spec["nproc_per_node"]) == (2, 2)
    assert spec["model"]["env"]["STORAGE_URI"] == "hf://me/model"
    assert (spec["model"]["secrets"], spec["dataset"]["secrets"]) == (
        ["ACCESS_TOKEN"],
        ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY"],
    )
    assert spec["exporter"]["env"] == {"STORAGE_URI": "hf://me/tuned", "EXPORT_FORM": "adapter"}
    assert "hush" not in json.dumps(spec)
    assert told(capfd, "jobs", "list")["jobs"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "--runtime", "luthier-qwen3-06b"], "did you mean luthier-qwen3-0.6b?"),
        (["submit", "--runtime", "luthier-qwen3-0.6b", "train.stps=1"], "train.stps: is not a known key; did you mean"),
        (
            ["submit", "--runtime", "luthier-qwen3-0.6b", "--nnodes", "0"],
            "trainer.config.num_nodes: must be more than 0",
        ),
        (["submit"], "initializer.model: is missing"),
        (["list", "--backend-option", "namespace=x"], '"namespace=x" is no setting of local'),
        (["list", "--backend-option", "max_running_jobs=many"], '"many" is not a whole number'),
        (["list", "--backend-option", "max_running_jobs=²"], '"²" is not a whole number'),
        (["list", "--watch", "--json"], "--json: prints one object, and watching has many"),
        (["get", "nobody"], "nobody"),
        (["logs", "nobody"], "nobody"),
        (["suspend", "nobody"], "nobody"),
        (["resume", "nobody"], "nobody"),
    ],
)
def test_refusals(capfd, words, message):
    assert main(["jobs", *words]) == 2
    assert message in capfd.readouterr().err
