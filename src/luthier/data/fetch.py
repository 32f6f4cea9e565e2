"""A file from an address that a row names, where its source allows that: over HTTP alone, within a time and a size."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import HTTPException

from luthier.data.report import BadRow

SECONDS, IN_ALL, MOST = 30, 120, 64 * 1024**2
"""Seconds that a server may be silent, and that a file may take; bytes."""


def fetch(url: str, what: str) -> bytes:
    """The bytes at an address.

    Args:
        url: of http or https; where it leads on, that must be too.
        what: what to call it in messages.

    Raises:
        BadRow: it cannot be had.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise BadRow(f"{what} ({url}) is at no address of http or https", reason="an image that cannot be fetched")
    begin, data = time.monotonic(), bytearray()
    try:
        with _opener().open(url, timeout=SECONDS) as answer:
            while len(data) <= MOST and (piece := answer.read1(1 << 20)):
                data += piece
                if time.monotonic() - begin > IN_ALL:
                    raise TimeoutError(f"it takes over {IN_ALL} seconds")
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        why = f"{what} ({url}) cannot be fetched ({reason})"
        raise BadRow(why, reason="an image that cannot be fetched") from error
    if len(data) > MOST:
        what = f"{what} ({url}) is larger than {MOST // 1024**2} MiB"
        raise BadRow(what, reason="an image that cannot be fetched")
    return bytes(data)


def _opener() -> urllib.request.OpenerDirector:
    """One that knows HTTP and nothing else: no files, no FTP, wherever an answer leads on to."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
