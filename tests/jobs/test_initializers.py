"""Initializers as processes: files from disks and web servers, and all that comes in between."""

from __future__ import annotations

import datetime
import ipaddress
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luthier.jobs.initializers import again
from luthier.jobs.initializers.fetch import MARKER
from luthier.jobs.initializers.fetch import fetch as fetch_here
from luthier.jobs.initializers.progress import Progress
from luthier.jobs.initializers.web import Web as WebSource
from luthier.jobs.storage import Access, StorageError, parse
from tests.jobs.transfer import BIG, Web, fails, fetch, start, tree, until, web, write

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
