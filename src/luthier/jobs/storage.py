"""Places that files come from and go to: what a URI means, who may see it, and what may be said about it.

Initializers and exporter read what they need from the environment, by Kubeflow's names. Nothing here opens a
connection: `initializers/{hub,bucket,web,disk}.py` do, each for one kind of place.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

from luthier.errors import UserError, first_line

SCHEMES = ("hf", "s3", "gs", "file", "https", "http")
_FORMS = "give hf://owner/name, s3://bucket/path, gs://bucket/path, file:///path or https://host/file"
_HUB_CREDENTIALS = re.compile(r"[^@]*:[^@]*@|hf_\w{8,}@")  # what else stands before the @ of hf:// is a name
SECRETS = ("ACCESS_TOKEN", "SECRET_ACCESS_KEY", "ACCESS_KEY_ID")
"""Variables that only the process of the transfer may see."""


class StorageError(UserError):
    """A place that cannot be read from or written to as asked; `where` is its URI without credentials."""


class BrokenError(Exception):
    """A transfer that broke off and may go on where it was."""


@dataclass(frozen=True, slots=True)
class Place:
    """A URI, taken apart.

    Attributes:
        scheme: one of `SCHEMES`.
        uri: without credentials and without query: what messages, markers and logs may say.
        address: with its query, for the one who connects.
        path: below the root of a bucket, a repository or the disk; no slash at its end, "" for all of it.
        bucket: of s3:// and gs://; the host of https://.
        repo: of hf://, "owner/name".
        repo_type: of hf://; None where the URI does not say.
        revision: of hf://, a branch, tag or commit.
        sha256: what the file must have, from the address's fragment (https://host/file#sha256=...).
    """

    scheme: str
    uri: str
    address: str = field(repr=False)
    path: str
    bucket: str = ""
    repo: str = ""
    repo_type: Literal["dataset", "model"] | None = None
    revision: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """With what to ask. None stands for what the surroundings have: a login, an instance's role."""

    token: str | None = field(default=None, repr=False)
    key_id: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    region: str | None = None
    role: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Access:
        """Read `ACCESS_TOKEN`, `ACCESS_KEY_ID`, `SECRET_ACCESS_KEY`, `ENDPOINT`, `REGION`, `ROLE_ARN`; empty is unset.

        Raises:
            StorageError: one half of a key is missing.
        """

        def read(name: str) -> str | None:
            return environment.get(name, "").strip() or None

        key_id, secret_key = read("ACCESS_KEY_ID"), read("SECRET_ACCESS_KEY")
        if (key_id is None) != (secret_key is None):
            there, missing = ("SECRET_ACCESS_KEY", "ACCESS_KEY_ID")[:: 1 if key_id is None else -1]
            raise StorageError(f"{missing} is missing", where=missing, remedy=f"it goes with {there}")
        return cls(read("ACCESS_TOKEN"), key_id, secret_key, read("ENDPOINT"), read("REGION"), read("ROLE_ARN"))


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a source.

    Attributes:
        name: relative, with slashes, the place that it gets below the target; it leads nowhere else.
        key: what the source calls it.
        size: in bytes; None where the source does not say before.
        checksum: ("sha256" | "md5" | "git", hexadecimal); "git" is the id of a blob.
        version: changes when the content does, as well as the source can tell ("" where it cannot).
    """

    name: str
    key: str
    size: int | None = None
    checksum: tuple[str, str] | None = None
    version: str = ""


class Source(Protocol):
    """Where an initializer gets files. All may be called from several threads."""

    place: Place

    def entries(self) -> list[Entry]:
        """All files, in any order.

        Raises:
            StorageError: there is nothing there, or it may not be read.
            BrokenError: the source did not answer.
        """

    def read(self, entry: Entry, start: int) -> Iterator[bytes | Literal["from the start"]]:
        """Content from byte `start` on. A source that cannot begin there says "from the start" first, and does so.

        Raises:
            StorageError, BrokenError: as `entries`.
        """

    def binding(self, entry: Entry) -> bool:
        """Whether the checksum that does not match tells of a fault (of some encrypted objects it does not)."""


def parse(text: str, *, where: str = "STORAGE_URI") -> Place:
    """Take a URI apart.

    Raises:
        StorageError: it is none that is known, or has credentials in it.
    """
    text = text.strip()
    if not text:
        raise StorageError("it is not set", where=where, remedy=_FORMS)
    parts = urlsplit(text)
    shown = without_credentials(text)
    if parts.scheme not in SCHEMES:
        raise StorageError(f"{shown!r} has no scheme that is known", where=where, remedy=_FORMS)
    if "@" in parts.netloc and (parts.scheme != "hf" or _HUB_CREDENTIALS.match(parts.netloc)):
        raise StorageError(
            f"{shown} came with credentials in it, where everyone reads them",
            where=where,
            remedy="leave them out and set ACCESS_TOKEN, or ACCESS_KEY_ID and SECRET_ACCESS_KEY",
        )
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise StorageError(f"{shown!r} has control characters in it", where=where, remedy=_FORMS)
    if parts.scheme == "hf":
        return _hub(text, where)
    if parts.scheme == "file":
        host, slash, path = text.removeprefix("file://").partition("/")  # a path may hold ? and #
        if host not in ("", "localhost") or not slash:
            raise StorageError(f"{shown!r} has no absolute path", where=where, remedy="write file:///path")
        return Place("file", shown, text, "/" + unquote(path).strip("/"))
    if not parts.netloc:
        raise StorageError(f"{shown!r} names no {'host' if 'http' in parts.scheme else 'bucket'}", where=where)
    if parts.scheme in ("http", "https"):
        path = unquote(parts.path)
        sha256 = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", parts.fragment)
        if parts.fragment and sha256 is None:
            raise StorageError(f"{shown} has a fragment that says nothing", where=where, remedy="write #sha256=HEX")
        address = text.partition("#")[0]
        return Place(parts.scheme, shown, address, path, parts.netloc, sha256=sha256[1].lower() if sha256 else None)
    path = text.partition("://")[2].partition("/")[2]  # a key may hold ? and #
    return Place(
        parts.scheme, f"{parts.scheme}://{parts.netloc}/{path}".rstrip("/"), text, path.strip("/"), parts.netloc
    )


def _hub(text: str, where: str) -> Place:
    rest = text.removeprefix("hf://").strip("/")
    found = re.fullmatch(
        r"(?:(?P<kind>datasets|models)/)?(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^/@]+))?(?P<path>/.*)?", rest
    )
    if found is None or any(part.strip(".") == "" for part in found["repo"].split("/")):
        raise StorageError(f"{text!r} names no repository of the Hub", where=where, remedy="write hf://owner/name")
    kind: Literal["dataset", "model"] | None = None
    if found["kind"]:
        kind = "dataset" if found["kind"] == "datasets" else "model"
    revision = unquote(found["revision"]) if found["revision"] else None
    path = inside((found["path"] or "").strip("/"), text) if (found["path"] or "").strip("/") else ""
    return Place("hf", text.rstrip("/"), text, path, repo=found["repo"], repo_type=kind, revision=revision)


def without_credentials(uri: str) -> str:
    """The URI without user, password, query and fragment, any of which may be a secret.

    >>> without_credentials("https://me:pass@host/file?signature=abc")
    'https://host/file'
    >>> without_credentials("hf://owner/name@main")
    'hf://owner/name@main'
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    host, slash, path = rest.partition("/")
    if scheme != "hf" or _HUB_CREDENTIALS.match(host):
        rest = host.rpartition("@")[2] + slash + path
    if scheme not in ("s3", "gs", "file"):
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{scheme}://{rest}"


def inside(name: str, uri: str) -> str:
    """The name, if it stays below the directory that it is joined to.

    Raises:
        StorageError: it leads out, or cannot be a path.

    >>> inside("a/b.txt", "s3://bucket")
    'a/b.txt'
    """
    parts = name.split("/")
    if re.search(r"[\x00-\x1f\x7f]", name):
        raise StorageError(f"it holds a file named {name!r}, which has control characters", where=uri)
    if any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"it holds a file named {name!r}, which would lead out of the directory", where=uri)
    if any(len(part.encode(errors="surrogateescape")) > 255 for part in parts):
        raise StorageError(f"it holds a file named {name[:60]!r}..., which is too long for a disk", where=uri)
    return name


def chosen(names: Iterable[str], ignore: Iterable[str], allow: Iterable[str] | None = None) -> list[str]:
    """Those names that no pattern of `ignore` matches and, where given, one of `allow` does, by the Hub's rules.

    >>> chosen(["a.bin", "sub/a.bin", "a.json", "onnx/x"], ["*.bin", "onnx/"])
    ['a.json']
    """

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, f"{one}*" if one.endswith("/") else one) for one in patterns)

    ignored, allowed = list(ignore), None if allow is None else list(allow)
    return [name for name in names if not matches(name, ignored) and (allowed is None or matches(name, allowed))]


class Hider:
    """Takes secrets out of texts: whatever a library's message says, none of these values is in it afterwards."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values = {environment.get(name, "").strip() for name in SECRETS}
        query = urlsplit(environment.get("STORAGE_URI", "").strip()).query
        self._values |= {query, *(part.partition("=")[2] for part in query.split("&"))}
        self._values = {value for value in self._values if len(value) > 3}

    def __call__(self, text: str) -> str:
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return re.sub(r"([?&][\w.-]+=)[^\s&'\"]{16,}", r"\1***", text)


@contextmanager
def told(
    place: Place, *raised: type[Exception], explain: Callable[[Exception], Exception | None] = lambda error: None
) -> Iterator[None]:
    """Turn what the system or a library raises into `StorageError` (final) or `BrokenError` (may be tried again).

    Args:
        place: for the sentence.
        raised: the library's errors, besides those that are `OSError`s.
        explain: what an error means; None where it does not know.
    """
    known: tuple[type[Exception], ...] = (OSError, *raised)
    try:
        yield
    except known as error:
        explained = explain(error)
        if explained is None and isinstance(error, (ConnectionError, TimeoutError)):
            explained = BrokenError(first_line(error))
        if explained is None and isinstance(error, FileNotFoundError):
            explained = StorageError("there is nothing there", where=place.uri, remedy="check the spelling")
        if explained is None and isinstance(error, PermissionError):
            explained = denied(place)
        if explained is None and isinstance(error, OSError):
            explained = StorageError(f"it cannot be reached: {first_line(error)}", where=place.uri)
        if explained is None:
            raise
        raise explained from error


def denied(place: Place) -> StorageError:
    """It is there, perhaps, but not for these credentials."""
    which = "ACCESS_KEY_ID and SECRET_ACCESS_KEY" if place.scheme == "s3" else "ACCESS_TOKEN"
    remedy = "check its permissions" if place.scheme == "file" else f"check {which}, and what they may do"
    return StorageError("access is denied", where=place.uri, remedy=remedy)
