"""https://: one file, from any server. http:// too, which does not get the token unless the server is this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal
from urllib.parse import urlsplit

import httpx2

from luthier.errors import first_line
from luthier.jobs.storage import Access, BrokenError, Entry, Place, StorageError, denied, told

TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken."""


class Web:
    """One file. Goes on where it was only if the server says by its ETag or date that it is the same file still."""

    def __init__(self, place: Place, access: Access) -> None:
        self.place = place
        headers = {"Accept-Encoding": "identity"}
        if access.token is not None:
            if place.scheme == "http" and not _is_here(place.address):
                remedy = "use https://, or leave ACCESS_TOKEN out"
                raise StorageError(
                    "http:// would show ACCESS_TOKEN to everyone between", where=place.uri, remedy=remedy
                )
            headers["Authorization"] = f"Bearer {access.token}"
        # Leaves the token out where a redirect leads to another host.
        self._client = httpx2.Client(headers=headers, follow_redirects=True, timeout=TIMEOUT)

    def entries(self) -> list[Entry]:
        name = self.place.path.rpartition("/")[2]
        if not name:
            remedy = "end it with a file's name; for a directory use hf://, s3://, gs:// or file://"
            raise StorageError("it names no file", where=self.place.uri, remedy=remedy)
        # Not HEAD, which addresses that are signed for GET refuse; the body is left unread.
        with self._told(), self._client.stream("GET", self.place.address) as response:
            response.raise_for_status()
            size = response.headers.get("Content-Length")
            etag = response.headers.get("ETag", "")
            version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
        checksum = ("sha256", self.place.sha256) if self.place.sha256 else None
        return [Entry(name, self.place.address, int(size) if size else None, checksum, version)]

    def read(self, entry: Entry, start: int) -> Iterator[bytes | Literal["from the start"]]:
        headers = {}
        if start:
            if not entry.version:
                yield "from the start"
            else:
                headers = {"Range": f"bytes={start}-", "If-Range": entry.version}
        with self._told(), self._client.stream("GET", entry.key, headers=headers) as response:
            response.raise_for_status()
            if headers and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                yield "from the start"
            yield from response.iter_raw()

    def binding(self, entry: Entry) -> bool:
        return True

    def _told(self) -> AbstractContextManager[None]:
        return told(self.place, httpx2.HTTPError, httpx2.InvalidURL, explain=self._explain)

    def _explain(self, error: Exception) -> Exception | None:
        if isinstance(error, httpx2.HTTPStatusError):
            return of_status(self.place, error.response.status_code)
        if isinstance(error, httpx2.ConnectError) and "certificate" in str(error).lower():
            remedy = "name the file of its authority in SSL_CERT_FILE"
            return StorageError(
                f"its certificate is not trusted: {first_line(error)}", where=self.place.uri, remedy=remedy
            )
        if isinstance(error, httpx2.TransportError):
            return BrokenError(first_line(error))
        if isinstance(error, (httpx2.HTTPError, httpx2.InvalidURL)):
            return StorageError(f"it cannot be read: {first_line(error)}", where=self.place.uri)
        return None


def of_status(place: Place, status: int) -> Exception:
    """What an HTTP status of a failure means."""
    if status in (401, 403):
        return denied(place)
    if status in (404, 410):
        return StorageError("there is nothing there", where=place.uri, remedy="check the spelling")
    if status in (408, 425, 429) or status >= 500:
        return BrokenError(f"the server answered {status}")
    return StorageError(f"the server answered {status}", where=place.uri)


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
