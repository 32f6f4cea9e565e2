"""Locks that end with the processes that hold them, however they end."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def take(path: Path, *, wait: bool) -> int | None:
    """Lock a file, which is made when it is not there.

    Args:
        wait: until nobody else holds it.

    Returns:
        a descriptor; the lock is held until it and all that were inherited from it are closed. None where another
        holds it and this was not to wait.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    with ExitStack() as unless_locked:
        unless_locked.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        unless_locked.pop_all()
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, this process alone holds the lock of a file."""
    descriptor = take(path, wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)
