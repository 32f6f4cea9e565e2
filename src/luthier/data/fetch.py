"""A file from an address that a row names, where its source allows that: over HTTP alone, within a time and a size."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException

from luthier.data.report import BadRow

SECONDS, MOST = 30, 64 * 1024**2


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
    try:
        with _opener().open(url, timeout=SECONDS) as answer:
            data: bytes = answer.read(MOST + 1)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        why = f"{what} ({url}) cannot be fetched ({reason})"
        raise BadRow(why, reason="an image that cannot be fetched") from error
    if len(data) > MOST:
        what = f"{what} ({url}) is larger than {MOST // 1024**2} MiB"
        raise BadRow(what, reason="an image that cannot be fetched")
    return data


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
