"""Initializers as processes: files from disks, web servers and the Hub, and all that comes in between."""

from __future__ import annotations

import datetime
import ipaddress
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luthier.jobs.initializers import again
from luthier.jobs.initializers.fetch import MARKER
from luthier.jobs.initializers.fetch import fetch as fetch_here
from luthier.jobs.initializers.progress import Progress
from luthier.jobs.initializers.web import Web as WebSource
from luthier.jobs.storage import Access, StorageError, parse
from tests.jobs.transfer import Web, environment, fails, fetch, start, tree, web
from tests.oracles.hub import hub

BIG = bytes(range(256)) * 12_000
"""3 MB, all parts of which differ from their neighbours."""


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def until(condition: object, process: subprocess.Popen[str]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


# --- the start


def test_the_start_is_light() -> None:
    code = "import sys, luthier.jobs.initializers.__main__, luthier.jobs.initializers.hub, luthier.jobs.exporter\n"
    code += "import luthier.jobs.initializers.bucket, luthier.jobs.initializers.web\n"
    code += "print({'torch', 'transformers', 'numpy', 'datasets', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("weights", {}, "say what to fetch; python -m luthier.jobs.initializers dataset|model|adapters"),
        ("dataset", {}, "STORAGE_URI: it is not set; give hf://owner/name"),
        ("dataset", {"STORAGE_URI": "owner/name"}, "'owner/name' has no scheme that is known"),
        ("dataset", {"STORAGE_URI": "https://me:hunter2x@h/x"}, "https://h/x came with credentials in it"),
        ("dataset", {"STORAGE_URI": "s3://b/x", "ACCESS_KEY_ID": "abc"}, "SECRET_ACCESS_KEY is missing"),
        (
            "dataset",
            {"STORAGE_URI": "http://h.example/x", "ACCESS_TOKEN": "t0ken"},
            "would show ACCESS_TOKEN to everyone",
        ),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, kind: str, values: dict[str, str], says: str) -> None:
    process = start("initializers", kind, workspace=tmp_path, **values)
    out, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert "hunter2x" not in out + err


def test_sigterm_ends_it(tmp_path: Path) -> None:
    """Also as the first process of a container, which gets no signal that it has no handler for."""
    with web(Web({"/rows.jsonl": BIG}, breaks=[1_000_000], hold=True)) as site:
        process = start("initializers", "dataset", workspace=tmp_path, STORAGE_URI=f"{site.address}/rows.jsonl")
        until(lambda: len(site.asked) == 2, process)
        process.terminate()
        process.communicate()
    assert process.returncode == 143


def test_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each time that it is due; what an earlier run fetched counts for the whole and not for the speed."""
    clock = iter([0.0, 1.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("luthier.jobs.initializers.progress.time.monotonic", lambda: next(clock))
    progress = Progress("model", 4_000_000)
    progress.add(1_000_000, here=True)
    progress.add(1_000_000)
    progress.add(500_000)
    progress.add(500_000)
    assert capsys.readouterr().out.splitlines() == [
        "model: 2.0 MB of 4.0 MB (50%), 500.0 kB/s, 4 s left",
        "model: 3.0 MB of 4.0 MB (75%), 500.0 kB/s, 2 s left",
    ]


# --- file://


def test_a_directory(tmp_path: Path) -> None:
    files = {"train.jsonl": b'{"text": "a"}\n', "sub/more.jsonl": b"{}\n", "sub/empty": b"", "notes.md": b"x"}
    source = write(tmp_path / "source", files)
    (source / "link.jsonl").symlink_to(source / "train.jsonl")
    (source / "sub" / "around").symlink_to(source)
    work = tmp_path / "work"
    done = fetch("dataset", f"file://{source}", work, IGNORE_PATTERNS="*.md, nothing")
    assert done.code == 0, done.err
    del files["notes.md"]
    assert tree(work / "dataset") == files | {"link.jsonl": files["train.jsonl"]}
    assert not (work / "dataset" / "link.jsonl").is_symlink()
    assert sorted(path.name for path in work.iterdir()) == [".dataset.lock", "dataset"]
    assert done.out.splitlines()[-1] == f"dataset: 4 files in {work / 'dataset'}"


def test_the_same_again_does_nothing_and_another_replaces(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"a.jsonl": b"1\n", "b.jsonl": b"2\n"})
    two = write(tmp_path / "two", {"b.jsonl": b"3\n"})
    work = tmp_path / "work"
    assert fetch("dataset", f"file://{one}", work).code == 0
    inode = (work / "dataset" / "a.jsonl").stat().st_ino
    again_ = fetch("dataset", f"file://{one}", work)
    assert again_.code == 0
    assert again_.out == f"dataset: file://{one} is in {work / 'dataset'} already\n"
    assert (work / "dataset" / "a.jsonl").stat().st_ino == inode
    assert fetch("dataset", f"file://{two}", work).code == 0
    assert tree(work / "dataset") == {"b.jsonl": b"3\n"}
    assert fetch("dataset", f"file://{two}", work, IGNORE_PATTERNS="a.*").out.count("1 file") == 2


def test_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "my data", {"a.gguf": b"GGUF", "b.gguf": b""})
    done = fetch("model", f"file://{source}/a.gguf".replace(" ", "%20"), tmp_path / "work")
    assert done.code == 0, done.err
    assert tree(tmp_path / "work" / "model") == {"a.gguf": b"GGUF"}


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a.jsonl": b"1\n"})
    work = write(tmp_path / "work", {"dataset/mine.jsonl": b"mine"})
    fails(fetch("dataset", f"file://{source}", work), f"{work}/dataset: it holds files that were not fetched")
    assert tree(work / "dataset") == {"mine.jsonl": b"mine"}
    (work / "dataset" / "mine.jsonl").unlink()
    assert fetch("dataset", f"file://{source}", work).code == 0


def test_what_a_disk_has_not(tmp_path: Path) -> None:
    work = tmp_path / "work"
    fails(fetch("dataset", f"file://{tmp_path}/nothing", work), f"file://{tmp_path}/nothing: there is nothing there")
    (tmp_path / "empty").mkdir()
    fails(fetch("dataset", f"file://{tmp_path}/empty", work), "there are no files in it")
    os.mkfifo(tmp_path / "empty" / "pipe")
    fails(fetch("dataset", f"file://{tmp_path}/empty", work), "'pipe' is no regular file")
    assert not (work / "dataset").exists()


MODEL = {"config.json": b"{}", "model.safetensors": b"w", "pytorch_model.bin": b"w", "x.msgpack": b"", "README.md": b""}


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (None, {"config.json", "model.safetensors", "README.md"}),
        ("", set(MODEL)),
        ("*.safetensors,*.md", {"config.json", "pytorch_model.bin", "x.msgpack"}),
    ],
)
def test_files_of_a_model(tmp_path: Path, ignore: str | None, left: set[str]) -> None:
    source = write(tmp_path / "source", MODEL)
    values = {} if ignore is None else {"IGNORE_PATTERNS": ignore}
    assert fetch("model", f"file://{source}", tmp_path / "work", **values).code == 0
    assert set(tree(tmp_path / "work" / "model")) == left


@pytest.mark.parametrize(
    ("kind", "files", "says"),
    [
        ("model", {"train.jsonl": b""}, "there is neither a config.json nor a .gguf file in it"),
        ("model", {"config.json": b"{}"}, "there are no weights in it"),
        ("model", {"config.json": b"{}", "pytorch_model.bin": b""}, "IGNORE_PATTERNS leaves out all of its weights"),
        ("model", {"pytorch_model.bin": b""}, "IGNORE_PATTERNS leaves out all of its files"),
        ("adapters", {"config.json": b"{}", "a.safetensors": b""}, "there is no adapter_config.json in it"),
    ],
)
def test_what_is_no_model(tmp_path: Path, kind: str, files: dict[str, bytes], says: str) -> None:
    source = write(tmp_path / "source", files)
    fails(fetch(kind, f"file://{source}", tmp_path / "work"), f"file://{source}: {says}")


def test_adapters_have_a_place_of_their_own(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w"})
    assert fetch("adapters", f"file://{source}", tmp_path / "work").code == 0
    assert len(tree(tmp_path / "work" / "adapters")) == 2


# --- https://


def test_a_file_of_a_web_server_that_breaks_off(tmp_path: Path) -> None:
    with web(Web({"/a/rows.jsonl": BIG}, breaks=[1_000_000, 500_000])) as site:
        done = fetch("dataset", f"{site.address}/a/rows.jsonl?signature=0123456789abcdef", tmp_path)
    assert done.code == 0, done.err
    assert tree(tmp_path / "dataset") == {"rows.jsonl": BIG}
    assert site.ranges_asked() == [None, None, "bytes=1000000-", "bytes=1500000-"]
    assert "0123456789abcdef" not in done.out + (tmp_path / "dataset" / MARKER).read_text()


def test_a_killed_process_is_gone_on_from(tmp_path: Path) -> None:
    site = Web({"/rows.jsonl": BIG}, breaks=[1_000_000], hold=True)
    with web(site):
        process = start("initializers", "dataset", workspace=tmp_path, STORAGE_URI=f"{site.address}/rows.jsonl")
        begun = tmp_path / ".dataset.partial" / "begun"
        until(lambda: begun.is_dir() and any(path.stat().st_size > 500_000 for path in begun.iterdir()), process)
        process.kill()
        process.communicate()
        assert not (tmp_path / "dataset").exists()
        had = max(path.stat().st_size for path in begun.iterdir())
        site.asked.clear()
        assert fetch("dataset", f"{site.address}/rows.jsonl", tmp_path).code == 0
        assert site.ranges_asked() == [None, f"bytes={had}-"]
    assert tree(tmp_path / "dataset") == {"rows.jsonl": BIG}


@pytest.mark.parametrize("how", ["changed", "no ranges", "no etag"])
def test_a_file_that_may_be_another_begins_anew(tmp_path: Path, how: str) -> None:
    site = Web({"/rows.jsonl": BIG}, breaks=[1_000_000], ranges=how != "no ranges", etags=how != "no etag")
    new = BIG[::-1] if how == "changed" else BIG
    with web(site):
        source = WebSource(parse(f"{site.address}/rows.jsonl"), Access())
        entry = source.entries()[0]
        with pytest.raises(Exception, match="peer closed"):
            b"".join(chunk for chunk in source.read(entry, 0) if isinstance(chunk, bytes))
        site.files["/rows.jsonl"] = new
        told = list(source.read(entry, 1_000_000))
    assert told[0] == "from the start"
    assert b"".join(chunk for chunk in told[1:] if isinstance(chunk, bytes)) == new


def test_a_server_without_etags_and_ranges_ends_well(tmp_path: Path) -> None:
    with web(Web({"/rows.jsonl": BIG}, breaks=[1_000_000], ranges=False, etags=False)) as site:
        assert fetch("dataset", f"{site.address}/rows.jsonl", tmp_path).code == 0
    assert tree(tmp_path / "dataset") == {"rows.jsonl": BIG}


def test_a_server_that_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "WAITS", (0.0, 0.0))
    monkeypatch.setattr("luthier.jobs.initializers.fetch.WAITS", (0.0, 0.0))
    site = Web({"/rows.jsonl": BIG}, breaks=[1_000_000, 0, 0, 0])
    with web(site):
        place = parse(f"{site.address}/rows.jsonl")
        with pytest.raises(StorageError, match=r"it does not answer: peer closed connection.*run it again") as caught:
            fetch_here(WebSource(place, Access()), tmp_path / "dataset", ignore=(), allow=None, check=lambda *_: None)
        assert caught.value.where == f"{site.address}/rows.jsonl"
    with pytest.raises(StorageError, match=r"it does not answer: .*refused"):
        fetch_here(WebSource(place, Access()), tmp_path / "dataset", ignore=(), allow=None, check=lambda *_: None)
    assert not (tmp_path / "dataset").exists()


def test_what_a_web_server_refuses(tmp_path: Path) -> None:
    with web(Web({"/x": b"abc"}, status={"/forbidden": 403, "/odd": 418})) as site:
        host = site.address
        fails(fetch("dataset", f"{host}/none?key=topsecret1", tmp_path), f"{host}/none: there is nothing there")
        fails(
            fetch("dataset", f"{host}/forbidden", tmp_path, ACCESS_TOKEN="wr0ng"),
            "access is denied; check ACCESS_TOKEN",
        )
        fails(fetch("dataset", f"{host}/odd", tmp_path), f"{host}/odd: the server answered 418")
        fails(fetch("dataset", f"{host}/x#sha256={'0' * 64}", tmp_path), "x came with another sha256 checksum")
        fails(fetch("dataset", f"{host}/", tmp_path), "it names no file")


def test_a_token_goes_to_its_host_alone(tmp_path: Path) -> None:
    with web(Web({"/there.jsonl": b"{}"})) as other, web(Web({})) as site:
        elsewhere = other.address.replace("127.0.0.1", "localhost")
        site.redirect["/here.jsonl"] = f"{elsewhere}/there.jsonl?signature=0123456789abcdef"
        assert fetch("dataset", f"{site.address}/here.jsonl", tmp_path, ACCESS_TOKEN="my-t0ken").code == 0
    assert all(headers["authorization"] == "Bearer my-t0ken" for _, headers in site.asked)
    assert other.asked
    assert all("authorization" not in headers for _, headers in other.asked)
    assert tree(tmp_path / "dataset") == {"here.jsonl": b"{}"}


def test_tls(tmp_path: Path) -> None:
    """The server proves who it is, or nothing is fetched."""
    pem = certificate(tmp_path / "server.pem")
    with web(Web({"/rows.jsonl": b"{}"}), pem) as site:
        uri = f"{site.address}/rows.jsonl"
        assert fetch("dataset", uri, tmp_path / "work", SSL_CERT_FILE=str(pem)).code == 0
        assert tree(tmp_path / "work" / "dataset") == {"rows.jsonl": b"{}"}
        fails(fetch("dataset", uri, tmp_path / "other"), f"{uri}: its certificate is not trusted: ")


def certificate(path: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path


# --- hf://


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
