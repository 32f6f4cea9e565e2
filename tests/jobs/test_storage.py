"""What URIs mean, what may be said about them, and which files are wanted."""

from __future__ import annotations

import pytest

from luthier.jobs.storage import Access, Hider, StorageError, chosen, inside, parse, without_credentials


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("hf://owner/name", {"repo": "owner/name", "path": "", "revision": None, "repo_type": None}),
        ("hf://owner/name/data", {"repo": "owner/name", "path": "data"}),
        ("hf://owner/name@v1.0/data/a.parquet", {"repo": "owner/name", "path": "data/a.parquet", "revision": "v1.0"}),
        ("hf://owner/name@refs%2Fpr%2F1", {"revision": "refs/pr/1"}),
        ("hf://datasets/owner/name/x", {"repo": "owner/name", "path": "x", "repo_type": "dataset"}),
        ("hf://gpt2", {"repo": "gpt2", "path": ""}),
        ("s3://bucket/a/b/", {"bucket": "bucket", "path": "a/b", "uri": "s3://bucket/a/b"}),
        ("s3://bucket", {"bucket": "bucket", "path": "", "uri": "s3://bucket"}),
        ("s3://bucket/what?#x", {"path": "what?#x", "uri": "s3://bucket/what?#x"}),
        ("gs://bucket/a", {"scheme": "gs", "bucket": "bucket", "path": "a"}),
        ("file:///srv/my%20data/", {"path": "/srv/my data"}),
        ("file:///srv/what?#x", {"path": "/srv/what?#x", "uri": "file:///srv/what?#x"}),
        ("https://host/a%20b.jsonl?key=abc", {"path": "/a b.jsonl", "uri": "https://host/a%20b.jsonl"}),
        ("https://host/a#sha256=" + "AB" * 32, {"sha256": "ab" * 32, "address": "https://host/a"}),
    ],
)
def test_uris(text: str, facts: dict[str, object]) -> None:
    place = parse(text)
    assert {name: getattr(place, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "STORAGE_URI: it is not set; give hf://owner/name"),
        ("owner/name", "'owner/name' has no scheme that is known; give hf://"),
        ("ftp://host/x", "'ftp://host/x' has no scheme that is known"),
        ("hf://", "names no repository"),
        ("hf://owner/..", "names no repository"),
        ("hf://owner/name/../x", "would lead out"),
        ("s3:///x", "'s3:///x' names no bucket"),
        ("https:///x", "names no host"),
        ("file://other/x", "has no absolute path"),
        ("https://me:word@host/x", "https://host/x came with credentials in it"),
        ("s3://key:word@bucket/x", "s3://bucket/x came with credentials in it"),
        ("hf://me:word@owner/name", "hf://owner/name came with credentials in it"),
        ("hf://hf_swordfishword@owner/name", "hf://owner/name came with credentials in it"),
        ("https://host/a#frag", "has a fragment that says nothing"),
        ("https://host/a\x1b[2J", "control characters"),
    ],
)
def test_uris_that_are_none(text: str, says: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "word" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_may_be_said() -> None:
    place = parse("https://host/x?X-Amz-Signature=0123456789abcdef")
    assert "0123" not in repr(place)
    assert without_credentials("s3://a:b@bucket/key") == "s3://bucket/key"
    access = Access.of({"ACCESS_TOKEN": "hf_secret", "ACCESS_KEY_ID": "AKIA1", "SECRET_ACCESS_KEY": "very/secret"})
    assert not {"hf_secret", "AKIA1", "very/secret"} & set(repr(access).replace("'", " ").split())
    assert repr(access) == "Access(endpoint=None, region=None, role=None)"


def test_secrets_are_hidden_wherever_they_stand() -> None:
    hide = Hider(
        {
            "ACCESS_TOKEN": "hf_abcdefgh",
            "SECRET_ACCESS_KEY": "s3cr3t/key+",
            "STORAGE_URI": "https://host/a.jsonl?token=deadbeefcafe&v=1",
        }
    )
    told = hide("GET https://host/a.jsonl?token=deadbeefcafe&v=1 with hf_abcdefgh and 's3cr3t/key+'")
    assert told == "GET https://host/a.jsonl?*** with *** and '***'"
    assert (
        hide("302 to https://cdn/x?X-Amz-Signature=0123456789abcdef01&b=1")
        == "302 to https://cdn/x?X-Amz-Signature=***&b=1"
    )


def test_half_a_key() -> None:
    for there, missing in (("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), ("SECRET_ACCESS_KEY", "ACCESS_KEY_ID")):
        with pytest.raises(StorageError, match=f"^{missing}: {missing} is missing; it goes with {there}$"):
            Access.of({there: "x" * 8})
    assert Access.of({"ACCESS_TOKEN": " "}) == Access()


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "a\0b", "a\nerror: b", "x" * 300]
)
def test_names_that_lead_out(name: str) -> None:
    with pytest.raises(StorageError, match="s3://bucket: it holds a file named"):
        inside(name, "s3://bucket")


def test_names_that_stay() -> None:
    for name in ("a", "a/b.c", "..a", "a..", "a\\b", "…", "a b"):
        assert inside(name, "s3://bucket") == name


def test_patterns() -> None:
    names = ["a.bin", "sub/a.bin", "a.safetensors", "onnx/model.x", "A.BIN", "config.json"]
    assert chosen(names, ["*.bin", "onnx/"]) == ["a.safetensors", "A.BIN", "config.json"]
    assert chosen(names, [], ["*.json"]) == ["config.json"]
    assert chosen(names, []) == names
