"""Initializers as processes, and a Hub that breaks off, refuses and means ill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.transfer import BIG, Web, environment, fails, fetch, start, tree, until, web, write
from tests.oracles.hub import hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = {"data/a.parquet": BIG, "data/b.parquet": b"PAR1", "README.md": b"# rows", "other/c.parquet": b""}
    write(tmp_path / "hub" / "datasets" / "maker" / "rows", rows)
    weights = {"config.json": b"{}", "model.safetensors": BIG, "pytorch_model.bin": b"", "logo.png": b""}
    weights |= {"chat_template.jinja": b"{{x}}", "onnx/model.onnx": b""}
    write(tmp_path / "hub" / "models" / "maker" / "tiny", weights)
    return tmp_path / "hub"


def test_a_data_set_of_the_hub(root: Path, tmp_path: Path) -> None:
    with hub(root, token="hf_let_me_in") as (endpoint, asked):
        access = {"HF_ENDPOINT": endpoint, "ACCESS_TOKEN": "hf_let_me_in"}
        done = fetch("dataset", "hf://maker/rows/data", tmp_path, **access)
        assert done.code == 0, done.err
        assert tree(tmp_path / "dataset") == {"data/a.parquet": BIG, "data/b.parquet": b"PAR1"}
        assert not any("other" in path for path in asked)
        assert fetch("dataset", "hf://maker/rows@main/data/b.parquet", tmp_path, **access).code == 0
        assert tree(tmp_path / "dataset") == {"data/b.parquet": b"PAR1"}
        assert fetch("dataset", "hf://datasets/maker/rows", tmp_path, IGNORE_PATTERNS="*.md", **access).code == 0
        assert set(tree(tmp_path / "dataset")) == {"data/a.parquet", "data/b.parquet", "other/c.parquet"}
        asked.clear()
        assert fetch("dataset", "hf://datasets/maker/rows", tmp_path, IGNORE_PATTERNS="*.md", **access).code == 0
        assert asked == []


def test_a_model_of_the_hub_that_breaks_off(root: Path, tmp_path: Path) -> None:
    with hub(root, breaks={"model.safetensors": [1_000_000, 700_000]}) as (endpoint, asked):
        done = fetch("model", "hf://maker/tiny", tmp_path, HF_ENDPOINT=endpoint)
    assert done.code == 0, done.err
    assert tree(tmp_path / "model")["model.safetensors"] == BIG
    assert set(tree(tmp_path / "model")) == {"config.json", "model.safetensors", "chat_template.jinja"}
    begun = [path for path in asked if path.startswith("model.safetensors from")]
    assert begun == [f"model.safetensors from {start}" for start in (0, 1_000_000, 1_700_000)]
    assert "model: model.safetensors broke off after 1.0 MB; going on" in done.out


def test_a_killed_process_is_gone_on_from_at_the_hub(root: Path, tmp_path: Path) -> None:
    """What is whole is not fetched again, what is begun from where it was."""
    breaks = {"model.safetensors": [1_000_000] + [0] * 99}
    with hub(root, breaks=breaks) as (endpoint, asked):
        process = start(
            "initializers", "model", workspace=tmp_path, STORAGE_URI="hf://maker/tiny", HF_ENDPOINT=endpoint
        )
        until(lambda: "model.safetensors from 1000000" in asked, process)
        process.kill()
        process.communicate()
        assert not (tmp_path / "model").exists()
        breaks.clear()
        asked.clear()
        assert fetch("model", "hf://maker/tiny", tmp_path, HF_ENDPOINT=endpoint).code == 0
    assert tree(tmp_path / "model")["model.safetensors"] == BIG
    assert [path for path in asked if " from " in path] == ["model.safetensors from 1000000"]


def test_what_the_hub_changed_since_is_fetched_anew(root: Path, tmp_path: Path) -> None:
    breaks = {"model.safetensors": [1_000_000] + [0] * 99}
    with hub(root, breaks=breaks) as (endpoint, asked):
        process = start(
            "initializers", "model", workspace=tmp_path, STORAGE_URI="hf://maker/tiny", HF_ENDPOINT=endpoint
        )
        until(lambda: "model.safetensors from 1000000" in asked, process)
        process.kill()
        process.communicate()
        breaks.clear()
        asked.clear()
        write(root / "models" / "maker" / "tiny", {"model.safetensors": BIG[::-1]})
        assert fetch("model", "hf://maker/tiny", tmp_path, HF_ENDPOINT=endpoint).code == 0
    assert tree(tmp_path / "model")["model.safetensors"] == BIG[::-1]
    assert [path for path in asked if " from " in path] == ["model.safetensors from 0"]


def test_bytes_that_turned_on_the_way_are_found(root: Path, tmp_path: Path) -> None:
    """Half of a file that rotted on the disk is fetched again."""
    breaks = {"config.json": [0] * 99, "model.safetensors": [1_000_000] + [0] * 99}
    with hub(root, breaks=breaks) as (endpoint, asked):
        process = start(
            "initializers", "model", workspace=tmp_path, STORAGE_URI="hf://maker/tiny", HF_ENDPOINT=endpoint
        )
        until(lambda: "model.safetensors from 1000000" in asked, process)
        process.kill()
        process.communicate()
        breaks.clear()
        asked.clear()
        for part in (tmp_path / ".model.partial" / "begun").iterdir():
            if part.stat().st_size == 1_000_000:
                part.write_bytes(bytes(1_000_000))
        assert fetch("model", "hf://maker/tiny", tmp_path, HF_ENDPOINT=endpoint).code == 0
    assert tree(tmp_path / "model")["model.safetensors"] == BIG
    begun = [path for path in asked if path.startswith("model.safetensors from")]
    assert begun == ["model.safetensors from 1000000", "model.safetensors from 0"]


@pytest.mark.parametrize(
    ("kind", "uri", "says"),
    [
        (
            "dataset",
            "hf://maker/nothing",
            "the Hub has no such data set; check the spelling; a private one",
        ),
        ("dataset", "hf://maker/tiny", "the Hub has no such data set"),
        ("model", "hf://maker/rows", "the Hub has no such model"),
        ("model", "hf://maker/tiny@v9", "the model has no revision 'v9'"),
        ("dataset", "hf://maker/rows/none", "the repository has no such file or directory"),
        ("model", "hf://maker/gated", "the model is open only to those it has let in; ask for access"),
    ],
)
def test_what_the_hub_has_not(root: Path, tmp_path: Path, kind: str, uri: str, says: str) -> None:
    write(root / "models" / "maker" / "gated", {"config.json": b"{}"})
    with hub(root, gated={"maker/gated"}) as (endpoint, _):
        fails(fetch(kind, uri, tmp_path, HF_ENDPOINT=endpoint, ACCESS_TOKEN="hf_s3cret"), f"error: {uri}: {says}")


def test_a_hub_that_lets_nobody_in(root: Path, tmp_path: Path) -> None:
    with hub(root, token="hf_right") as (endpoint, _):
        done = fetch("model", "hf://maker/tiny", tmp_path, HF_ENDPOINT=endpoint, ACCESS_TOKEN="hf_wrong")
        fails(done, "hf://maker/tiny: the Hub has no such model; check the spelling; a private one needs ACCESS_TOKEN")


def test_a_hub_that_is_not_asked(tmp_path: Path) -> None:
    fails(
        fetch("model", "hf://maker/tiny", tmp_path, HF_HUB_OFFLINE="1"),
        "HF_HUB_OFFLINE is set, so the Hub is not asked",
    )


def test_names_that_lead_out_are_refused(tmp_path: Path) -> None:
    """A Hub of ill will lists a file above the repository."""
    with web(Web({})) as site:
        api = "/api/models/maker/evil"
        site.files[f"{api}/revision/main"] = b'{"id": "maker/evil", "sha": "%s", "siblings": []}' % (b"a" * 40)
        listed = b'[{"type": "file", "path": "../../escaped.json", "size": 1, "oid": "%s"}]' % (b"b" * 40)
        site.files[f"{api}/tree/{'a' * 40}"] = listed
        work = tmp_path / "a" / "b"
        fails(
            fetch("model", "hf://maker/evil", work, HF_ENDPOINT=site.address),
            "named '../../escaped.json', which would lead",
        )
    assert not list(tmp_path.rglob("escaped.json"))


def test_two_at_once_fetch_once(root: Path, tmp_path: Path) -> None:
    with hub(root) as (endpoint, asked):
        values = {"STORAGE_URI": "hf://maker/tiny", "HF_ENDPOINT": endpoint}
        both = [start("initializers", "model", workspace=tmp_path, **values) for _ in range(2)]
        told = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sum(path == "model.safetensors from 0" for path in asked) == 1


def test_secrets_are_in_no_process_list(root: Path, tmp_path: Path) -> None:
    with hub(root, token="hf_let_me_in", breaks={"model.safetensors": [1000] + [0] * 99}) as (endpoint, asked):
        values = {"STORAGE_URI": "hf://maker/tiny", "HF_ENDPOINT": endpoint, "ACCESS_TOKEN": "hf_let_me_in"}
        process = start("initializers", "model", workspace=tmp_path, **values)
        until(lambda: "model.safetensors from 1000" in asked, process)
        assert b"hf_let" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.kill()
        out, err = process.communicate()
    assert "hf_let" not in out + err
    assert all("hf_let" not in path for path in asked)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hf_let" not in path.read_bytes()


def test_environment_of_the_tests_has_no_logins() -> None:
    assert not {"HF_TOKEN", "AWS_ACCESS_KEY_ID"} & set(environment(Path("/nowhere")))
