"""Trying again what broke off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from luthier.jobs.initializers.progress import say
from luthier.jobs.storage import BrokenError, Place, StorageError

WAITS = (0.2, 1.0, 3.0, 9.0, 15.0)
"""Seconds before a transfer that broke off and has not moved since is tried again."""

T = TypeVar("T")


def again(call: Callable[[], T], place: Place, who: str) -> T:
    """Call until it does not break off, but not for ever.

    Args:
        call: raises `BrokenError` where it may be called again.
        place: what does not answer, for the sentence.
        who: begins the lines that tell of it.

    Raises:
        StorageError: it broke off each time.
    """
    for pause in (*WAITS, None):
        try:
            return call()
        except BrokenError as error:
            if pause is None:
                raise gone(place, error) from error
            say(f"{who}: {place.uri} does not answer; once more")
            time.sleep(pause)
    raise AssertionError


def gone(place: Place, error: BrokenError) -> StorageError:
    """What is said when it stays away."""
    remedy = "run it again when it does"
    return StorageError(f"it does not answer: {str(error).rstrip('.')}", where=place.uri, remedy=remedy)
