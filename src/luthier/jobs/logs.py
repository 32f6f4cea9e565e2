"""Logs that are being written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PAUSE = 0.05
_PIECE = 1 << 20


def tail(path: Path, over: Callable[[], bool]) -> Iterator[str]:
    """Lines of a log without line ends, each as soon as it is written, until nothing more can come.

    Args:
        path: of a file that may not be there yet.
        over: whether its writer has ended; asked before reading, so that what was written until then is read after.
    """
    rest = b""
    with contextlib.ExitStack() as opened:
        log = None
        while True:
            if log is None and path.exists():
                log = opened.enter_context(path.open("rb"))
            last = over()
            while log is not None and (piece := log.read(_PIECE)):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", "replace").rstrip("\r")
            if last:
                break
            time.sleep(_PAUSE)
    if rest:
        yield rest.decode("utf-8", "replace")


def last_lines(log: Path, count: int = 12, most: int = 4000) -> str:
    """The end of a log, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * most))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])[-most:]
