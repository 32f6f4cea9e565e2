"""The exporter as a process: what was trained, taken to a directory, a bucket and the Hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from luthier.jobs.exporter import name_base
from luthier.jobs.exporter_targets import MARK, BucketTarget, HubTarget
from luthier.jobs.initializers.fetch import MARKER
from luthier.jobs.storage import Access, StorageError, parse
from tests.jobs.transfer import S3, Done, fails, gcs, s3, start, step, tree, until, wire
from tests.oracles.hub import hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of two steps that trained an adapter."""
    work = tmp_path_factory.mktemp("work")
    (work / "dataset").mkdir()
    (work / "dataset" / "rows.jsonl").write_text('{"text": "one row"}\n{"text": "another row"}\n')
    command = [sys.executable, "-m", "luthier", "train", "--model", "debug:llama", "--data", "dataset/rows.jsonl"]
    command += ["--output", "output", "train.steps=2", "adapter.rank=2", "--json"]
    values = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=work, env=values, check=True, capture_output=True)
    shutil.rmtree(work / "output" / "export", ignore_errors=True)
    return work


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3() as started:
        yield started


def export(uri: str, work: Path, **values: str) -> Done:
    return step("exporter", workspace=work, STORAGE_URI=uri, HF_HUB_OFFLINE="0", OMP_NUM_THREADS="1", **values)


def opens(directory: Path) -> None:
    """Plain Transformers reads it and it has the model's parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert AutoTokenizer.from_pretrained(directory)("one row").input_ids


def test_to_a_directory(run: Path, tmp_path: Path) -> None:
    """An earlier export is replaced. The process that exports knows no secrets."""
    uri = f"file://{tmp_path}/models/mine"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for name in (MARK, "of an earlier one"):
        (tmp_path / "models" / "mine" / name).touch()
    values = {"STORAGE_URI": uri, "ACCESS_TOKEN": "hf_s3cret_s3cret", "OMP_NUM_THREADS": "1"}
    process = start("exporter", workspace=run, **values)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def exporting() -> bool:
        pids = children.read_text().split()
        return bool(pids) and b"--merge" in Path(f"/proc/{pids[0]}/cmdline").read_bytes()

    until(exporting, process)
    assert b"s3cret" not in Path(f"/proc/{children.read_text().split()[0]}/environ").read_bytes()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == f"exporter: {len(tree(tmp_path / 'models' / 'mine'))} files in {uri}"
    assert "s3cret" not in out + err
    opens(tmp_path / "models" / "mine")
    assert "of an earlier one" not in tree(tmp_path / "models" / "mine")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]


def test_to_s3(run: Path, server: S3) -> None:
    """What makes it a model comes last, over an earlier export of which nothing is left."""
    server.put({f"m/{MARK}": b"{}", "m/adapter_config.json": b"old", "m/model.safetensors": b"old", "mx/a": b""})
    with wire(server.access["ENDPOINT"], cut_after=None) as line:
        access = server.access | {"ENDPOINT": line.address}
        done = export("s3://bucket/m", run, EXPORT_FORM="adapter", **access)
    assert done.code == 0, done.err
    assert server.objects("m/") == tree(run / "export")
    assert {"adapter_config.json", "adapter_model.safetensors", MARK} <= set(tree(run / "export"))
    writes = [request for request in line.requests if request.startswith(("PUT", "POST", "DELETE"))]
    assert writes[0].startswith("POST /bucket?delete")
    assert writes[-1] == "PUT /bucket/m/adapter_config.json"
    assert any(request.startswith("POST /bucket?delete") for request in writes[1:-1])


def test_half_an_export_is_none(server: S3, tmp_path: Path) -> None:
    """A file that cannot be uploaded ends it before the config, and the earlier one's is gone."""
    server.put({f"half/{MARK}": b"{}", "half/config.json": b"old", "half/model.safetensors": b"old"})
    for name in (MARK, "config.json", "model.safetensors"):
        (tmp_path / name).write_text("new")
    access = Access.of(server.access)
    target = BucketTarget(parse("s3://bucket/half"), access)
    target.prepare()
    (tmp_path / "model.z.safetensors").symlink_to("/proc/self/mem")  # a disk with an error
    with pytest.raises(StorageError, match="Input/output error"):
        target.put(tmp_path, [MARK, "config.json", "model.safetensors", "model.z.safetensors"])
    assert server.objects("half/") == {MARK: b"new", "model.safetensors": b"new"}
    target = BucketTarget(parse("s3://bucket/half"), access)
    target.prepare()
    target.put(tmp_path, [MARK, "config.json", "model.safetensors"])
    assert server.objects("half/") == dict.fromkeys((MARK, "config.json", "model.safetensors"), b"new")


def test_adapters_name_the_base_where_it_came_from(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "export").mkdir()
    config = tmp_path / "export" / "adapter_config.json"
    for uri, base, named in [
        ("hf://maker/tiny@v1", "model", {"base_model_name_or_path": "maker/tiny", "revision": "v1"}),
        ("hf://maker/tiny", "maker/other", {"base_model_name_or_path": "maker/other"}),
        ("s3://bucket/tiny", "model", {"base_model_name_or_path": "model"}),
    ]:
        (tmp_path / "model" / MARKER).write_text(json.dumps({"of": {"uri": uri}}))
        config.write_text(json.dumps({"base_model_name_or_path": base, "r": 2}))
        name_base(tmp_path)
        assert json.loads(config.read_text()) == named | {"r": 2}


def test_to_googles(tmp_path: Path) -> None:
    for name in (MARK, "config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    with gcs() as address:
        target = BucketTarget(parse("gs://bucket/models/mine"), Access(endpoint=address))
        target.prepare()
        target.put(tmp_path, [MARK, "config.json", "model.safetensors"])
        files = target._bucket.files
        assert {key: files.cat_file(key) for key in files.find("bucket/")} == {
            f"bucket/models/mine/{name}": name.encode() for name in (MARK, "config.json", "model.safetensors")
        }


def test_to_the_hub(run: Path, tmp_path: Path) -> None:
    """One commit; a repository that is new is private; what an upload loses on the way is sent again."""
    with hub(tmp_path, token="hf_write_token", breaks={"upload": [1]}) as (endpoint, asked):
        access = {"HF_ENDPOINT": endpoint, "ACCESS_TOKEN": "hf_write_token"}
        done = export("hf://maker/tuned", run, **access)
        assert done.code == 0, done.err
        repository = tmp_path / "models" / "maker" / "tuned"
        assert tree(repository) == tree(run / "export")
        opens(repository)
        wanted = json.loads((tmp_path / "created.jsonl").read_text())
        assert (wanted["name"], wanted["organization"], wanted["visibility"]) == ("tuned", "maker", "private")
        assert sum("/commit/" in path for path in asked) == 1
        assert sum(path.startswith("/upload/") for path in asked) == 2


@pytest.mark.parametrize(
    ("uri", "values", "says"),
    [
        ("https://host/x", {}, "https://host/x: nothing can be uploaded there; name an hf://"),
        ("hf://datasets/maker/x", {}, "hf://datasets/maker/x: that is no model repository"),
        ("hf://maker/x", {"EXPORT_FORM": "gguf"}, "EXPORT_FORM: 'gguf' is no form of a model; set merged or adapter"),
        ("s3://none/x", {}, "s3://none/x: there is nothing there"),
        ("s3://bucket/taken", {}, "s3://bucket/taken: there are other files; name a path that is empty"),
        ("file:///dev/null", {}, "file:///dev/null: it is a file; name a directory"),
        ("file:///proc/luthier/x", {}, "file:///proc/luthier/x: "),
    ],
)
def test_targets_that_cannot_be(tmp_path: Path, server: S3, uri: str, values: dict[str, str], says: str) -> None:
    """Said before a model is written."""
    server.put({"taken/rows.jsonl": b""})
    (tmp_path / "output").mkdir()
    access = server.access if uri.startswith("s3") else {}
    fails(export(uri, tmp_path, **access, **values), says)


def test_a_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    fails(export(f"file://{tmp_path}/mine", tmp_path), f"file://{tmp_path}/mine: there are other files")


def test_a_hub_that_does_not_take_it(tmp_path: Path) -> None:
    with hub(tmp_path, token="hf_right") as (endpoint, _):
        done = export("hf://maker/x", tmp_path, HF_ENDPOINT=endpoint, ACCESS_TOKEN="hf_wrong")
    fails(done, "hf://maker/x: ")


def test_no_run(tmp_path: Path) -> None:
    fails(export(f"file://{tmp_path}/x", tmp_path), f"{tmp_path}/output: there is no run to export; train first")


def test_what_luthier_export_says_is_what_is_said(tmp_path: Path) -> None:
    """Its sentence and its exit code are the step's."""
    (tmp_path / "output").mkdir()
    fails(export(f"file://{tmp_path}/x", tmp_path), "output")
    assert not (tmp_path / "x").exists()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.mark.usefixtures("online")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # how huggingface_hub uploads
def test_what_a_repository_had(tmp_path: Path) -> None:
    """Weights of an earlier export go, its owner's files stay, and so does what is beside the path."""
    repository = tmp_path / "models" / "maker" / "x"
    for name in ("v2/model-00001-of-00002.safetensors", "v2/LICENSE", "model.safetensors"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("old")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("w")
    with hub(tmp_path) as (endpoint, _):
        target = HubTarget(parse("hf://maker/x/v2"), Access(token="hf_x"))
        target._hub.api.endpoint = endpoint
        target.prepare()
        target.put(tmp_path, ["config.json", "model.safetensors"])
    assert tree(repository) == {
        "v2/config.json": b"{}",
        "v2/model.safetensors": b"w",
        "v2/LICENSE": b"old",
        "model.safetensors": b"old",
    }


@pytest.mark.usefixtures("online")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # how huggingface_hub uploads
def test_a_hub_that_ignores_files_is_noticed(tmp_path: Path) -> None:
    """A repository's .gitignore may leave files out of a commit without a word."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("w")
    with hub(tmp_path, ignored={"model.safetensors"}) as (endpoint, _):
        target = HubTarget(parse("hf://maker/x"), Access(token="hf_x"))
        target._hub.api.endpoint = endpoint
        target.prepare()
        with pytest.raises(StorageError, match=r"it left out model\.safetensors"):
            target.put(tmp_path, ["config.json", "model.safetensors"])
