"""s3:// and gs:// through fsspec: a file, or all files below a path."""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal
from urllib.parse import urlsplit

from luthier.errors import first_line
from luthier.jobs.storage import Access, BrokenError, Entry, Place, StorageError, denied, told

CHUNK = 16 << 20
"""Bytes of one request."""
ROLE_SECONDS = 2400.0
"""How long what a role was lent is used; it is good for an hour."""
EXTRAS = {"s3": ("s3fs", "jobs"), "gs": ("gcsfs", "gs")}


class Bucket:
    """A path of a bucket. Names of files are what follows the path, a file's own name where the path is a file."""

    def __init__(self, place: Place, access: Access) -> None:
        self.place = place
        self.root = f"{place.bucket}/{place.path}".rstrip("/")
        self._access = access
        self._lock = threading.Lock()
        self._files: Any = None
        self._until = float("inf")

    @property
    def files(self) -> Any:
        """The fsspec file system, connected anew before a role's credentials run out."""
        with self._lock:
            if self._files is None or time.monotonic() > self._until:
                with self.told():
                    self._files = self._connect()
            return self._files

    def _connect(self) -> Any:
        module, extra = EXTRAS[self.place.scheme]
        # Spares the import of gRPC, where nobody else has imported gcsfs before.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            remedy = f"install it: pip install 'luthier[{extra}]'"
            raise StorageError(
                f"{self.place.scheme}:// needs the package {module}", where=self.place.uri, remedy=remedy
            ) from error
        access = self._access
        if self.place.scheme == "s3":
            # Trying again is the caller's: three such loops, one in another, would take minutes to give up.
            once = {"retries": {"total_max_attempts": 1}, "connect_timeout": 20}
            files = library.S3FileSystem(
                config_kwargs=once, skip_instance_cache=True, use_listings_cache=False, **self._s3()
            )
            files.retries = 1
            return files
        token: Any = None
        if access.token is not None:
            token = importlib.import_module("google.oauth2.credentials").Credentials(access.token)
        elif access.endpoint is not None:
            token = "anon"  # an emulator, or a server that speaks like Google's and knows none of its accounts
        # Not gcsfs.GCSFileSystem, which may ask over gRPC what kind of bucket it is, for a minute or for ever.
        return library.core.GCSFileSystem(
            token=token, endpoint_url=access.endpoint, skip_instance_cache=True, use_listings_cache=False
        )

    def _s3(self) -> dict[str, Any]:
        """What s3fs is told. Without any credentials, here and in the surroundings, it asks as nobody."""
        from botocore.session import get_session

        access = self._access
        client = {"endpoint_url": access.endpoint, "region_name": access.region}
        client = {key: value for key, value in client.items() if value is not None}
        keys: dict[str, Any] = {}
        if access.key_id is not None:
            keys = {"key": access.key_id, "secret": access.secret_key}
        if access.role is not None:
            lender: dict[str, Any] = {"region_name": access.region or "us-east-1"}
            host = urlsplit(access.endpoint or "").hostname or ""
            if access.endpoint and not host.endswith(".amazonaws.com"):
                lender["endpoint_url"] = access.endpoint  # others answer for roles where they answer for files
            if access.key_id is not None:
                lender |= {"aws_access_key_id": access.key_id, "aws_secret_access_key": access.secret_key}
            sts = get_session().create_client("sts", **lender)
            lent = sts.assume_role(RoleArn=access.role, RoleSessionName="luthier")["Credentials"]
            keys = {"key": lent["AccessKeyId"], "secret": lent["SecretAccessKey"], "token": lent["SessionToken"]}
            self._until = time.monotonic() + ROLE_SECONDS
        if not keys and get_session().get_credentials() is None:
            keys = {"anon": True}
        return {**keys, "client_kwargs": client}

    def entries(self) -> list[Entry]:
        with self.told():
            if self.place.path:
                found = {self.root: info} if (info := self._file()) else self.files.find(self.root + "/", detail=True)
            else:
                found = self.files.find(self.root, detail=True)
        entries = [self._entry(key, info) for key, info in found.items() if not key.endswith("/")]
        if not entries:
            raise StorageError("there is nothing there", where=self.place.uri, remedy="check the spelling")
        return entries

    def _file(self) -> dict[str, Any] | None:
        try:
            info = self.files.info(self.root)
        except FileNotFoundError:
            return None
        return info if info["type"] == "file" else None

    def read(self, entry: Entry, start: int) -> Iterator[bytes | Literal["from the start"]]:
        size = entry.size or 0
        with self.told():
            for begin in range(start, size, CHUNK):
                yield self.files.cat_file(entry.key, start=begin, end=min(begin + CHUNK, size))
            if start < size and entry.version and _version(self.files.info(entry.key)) != entry.version:
                raise StorageError(
                    f"{entry.name} was replaced while it was read", where=self.place.uri, remedy="start again"
                )

    def binding(self, entry: Entry) -> bool:
        """The ETag of an object that S3 encrypts with a key of KMS or of the customer is no MD5."""
        if self.place.scheme != "s3":
            return True
        bucket, _, key = entry.key.partition("/")
        with self.told():
            head = self.files.call_s3("head_object", Bucket=bucket, Key=key)
        return not (head.get("SSECustomerAlgorithm") or "kms" in head.get("ServerSideEncryption", ""))

    def _entry(self, key: str, info: dict[str, Any]) -> Entry:
        name = key.rpartition("/")[2] if key == self.root else key.removeprefix(f"{self.root}/")
        return Entry(name, key, info["size"], _checksum(info), _version(info))

    def told(self) -> AbstractContextManager[None]:
        """Within, errors of s3fs, gcsfs and what they stand on become those of storage."""
        return told(self.place, ValueError, *_raised(self.place.scheme), explain=self._explain)

    def _explain(self, error: Exception) -> Exception | None:
        """What an error of s3fs, gcsfs or what they stand on means."""
        chain, link = [error], error.__cause__ or error.__context__
        while isinstance(link, Exception) and link not in chain:
            chain.append(link)
            link = link.__cause__ or link.__context__
        kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
        codes = {_code(one) for one in chain}
        if "FileNotFoundError" in kinds or codes & {"404", "NoSuchKey", "NoSuchBucket"}:
            return StorageError("there is nothing there", where=self.place.uri, remedy="check the spelling")
        if codes & {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId"} or "RefreshError" in kinds:
            return StorageError("the credentials are not taken", where=self.place.uri, remedy="check them")
        if "PermissionError" in kinds or codes & {"401", "403", "AccessDenied", "Forbidden"}:
            return denied(self.place)
        if kinds & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}:
            return StorageError(
                "there are no credentials for it", where=self.place.uri, remedy=denied(self.place).remedy
            )
        if kinds & _PASSING or any(code.startswith("5") for code in codes):
            return BrokenError(first_line(error))
        if kinds & {"BotoCoreError", "ClientError", "HttpError", "GoogleAuthError", "ValueError"}:
            return StorageError(f"it cannot be read: {first_line(error)}", where=self.place.uri)
        return None


_RAISED = {
    "s3": (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
    ),
    "gs": (("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError"), ("aiohttp", "ClientError")),
}
"""What libraries raise: modules, which may not be installed, and names in them."""


def _raised(scheme: str) -> Iterator[type[Exception]]:
    for module, name in _RAISED[scheme]:
        with contextlib.suppress(ImportError):
            yield getattr(importlib.import_module(module), name)


_PASSING = {
    "HTTPClientError",  # of botocore: connections that fail or break
    "ResponseStreamingError",
    "IncompleteReadError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "TransportError",  # of google.auth
}
_PASSING |= {
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ConnectionError",
    "TimeoutError",
}


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "code", ""))


def _version(info: dict[str, Any]) -> str:
    return str(info.get("ETag") or info.get("generation") or info.get("etag") or "").strip('"')


def _checksum(info: dict[str, Any]) -> tuple[str, str] | None:
    if info.get("md5Hash"):
        return "md5", binascii.hexlify(base64.b64decode(info["md5Hash"])).decode()
    etag = str(info.get("ETag", "")).strip('"')
    return ("md5", etag) if len(etag) == 32 and set(etag) <= set("0123456789abcdef") else None
