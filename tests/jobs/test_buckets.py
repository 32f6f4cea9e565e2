"""s3:// against moto's server, gs:// against an emulator of Google's: real protocols on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from luthier.jobs.initializers.bucket import Bucket
from luthier.jobs.storage import Access, BrokenError, parse
from tests.jobs.transfer import S3, environment, fails, fetch, gcs, s3, tree, wire

ROWS = {"data/a.jsonl": b'{"text": "a"}\n' * 100, "data/sub/b.jsonl": b"x", "data/empty": b"", "data/": b""}
OTHERS = {"data2/c.jsonl": b"c", "one.jsonl": b"1", "evil/../../x": b"1"}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3() as started:
        started.put(ROWS | OTHERS)
        yield started


def test_files_below_a_path(server: S3, tmp_path: Path) -> None:
    done = fetch("dataset", "s3://bucket/data/", tmp_path, **server.access)
    assert done.code == 0, done.err
    assert tree(tmp_path / "dataset") == {"a.jsonl": ROWS["data/a.jsonl"], "sub/b.jsonl": b"x", "empty": b""}
    assert "AKIATESTS" not in done.out + (tmp_path / "dataset" / ".luthier-fetched").read_text()
    assert fetch("dataset", "s3://bucket/one.jsonl", tmp_path, **server.access).code == 0
    assert tree(tmp_path / "dataset") == {"one.jsonl": b"1"}


def test_a_role_is_taken(server: S3, tmp_path: Path) -> None:
    role = {"ROLE_ARN": "arn:aws:iam::123456789012:role/reader"}
    done = fetch("dataset", "s3://bucket/data", tmp_path, IGNORE_PATTERNS="sub/", **server.access, **role)
    assert done.code == 0, done.err
    assert set(tree(tmp_path / "dataset")) == {"a.jsonl", "empty"}


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://bucket/none", "s3://bucket/none: there is nothing there; check the spelling"),
        ("s3://none/data", "s3://none/data: there is nothing there"),
        ("s3://bucket/evil", "s3://bucket/evil: it holds a file named '../../x', which would lead out"),
    ],
)
def test_what_a_bucket_has_not(server: S3, tmp_path: Path, uri: str, says: str) -> None:
    fails(fetch("dataset", uri, tmp_path / "a" / "b", **server.access), says)
    assert not list(tmp_path.rglob("x"))


def test_who_has_no_keys_asks_as_nobody(server: S3, tmp_path: Path) -> None:
    access = {"ENDPOINT": server.access["ENDPOINT"]}
    fails(fetch("dataset", "s3://bucket/one.jsonl", tmp_path, **access), "access is denied; check ACCESS_KEY_ID and")
    server.client.put_object_acl(Bucket="bucket", Key="one.jsonl", ACL="public-read")
    assert fetch("dataset", "s3://bucket/one.jsonl", tmp_path, **access).code == 0


def test_a_line_that_breaks(server: S3, tmp_path: Path) -> None:
    """Of 25 MB the part that came is kept, and the rest asked for again."""
    rows = bytes(range(256)) * 100_000
    server.put({"large/rows.jsonl": rows})
    with wire(server.access["ENDPOINT"], cut_after=18_000_000) as line:
        done = fetch("dataset", "s3://bucket/large", tmp_path, **server.access | {"ENDPOINT": line.address})
    assert done.code == 0, done.err
    assert tree(tmp_path / "dataset") == {"rows.jsonl": rows}
    assert line.ranges == ["0-16777215", "16777216-25599999", "16777216-25599999"]


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    access = Access(key_id="AKIATESTS", secret_key="s3cr3t/of+tests", endpoint="http://127.0.0.1:9")
    with pytest.raises(BrokenError, match="Could not connect to the endpoint"):
        Bucket(parse("s3://bucket/x"), access).entries()


@pytest.mark.parametrize(("scheme", "module", "extra"), [("s3", "s3fs", "jobs"), ("gs", "gcsfs", "gs")])
def test_a_package_that_is_not_installed(tmp_path: Path, scheme: str, module: str, extra: str) -> None:
    code = f"import sys, runpy; sys.modules[{module!r}] = None; sys.argv[1:] = ['dataset']\n"
    code += "runpy.run_module('luthier.jobs.initializers', run_name='__main__')"
    values = environment(tmp_path, STORAGE_URI=f"{scheme}://bucket/x")
    done = subprocess.run([sys.executable, "-c", code], env=values, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = f"{scheme}:// needs the package {module}; install it: pip install 'luthier[{extra}]'"
    assert done.stderr == f"error: {scheme}://bucket/x: {told}\n"


def test_googles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcsfs.GCSFileSystem", None)  # somebody imported gcsfs, and with it what asks over gRPC
    with gcs() as address:
        files = Bucket(parse("gs://bucket"), Access(endpoint=address)).files
        for key, content in {"data/a.jsonl": b"{}\n", "data/sub/b.jsonl": b"x", "data2/c": b"1"}.items():
            files.pipe_file(f"bucket/{key}", content)
        done = fetch("dataset", "gs://bucket/data", tmp_path, ENDPOINT=address)
        assert done.code == 0, done.err
        assert tree(tmp_path / "dataset") == {"a.jsonl": b"{}\n", "sub/b.jsonl": b"x"}
        fails(
            fetch("dataset", "gs://bucket/none", tmp_path, ENDPOINT=address), "gs://bucket/none: there is nothing there"
        )
