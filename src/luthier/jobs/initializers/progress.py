"""How far a transfer is, in a line every few seconds, for logs that nobody redraws."""

from __future__ import annotations

import threading
import time

EVERY = 2.0
"""Seconds between lines; what takes less says only that it begins and ends."""


class Progress:
    """Counts bytes from any thread.

    Args:
        name: what begins each line.
        total: bytes in all; None where that is not known.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total = name, total
        self._lock = threading.Lock()
        self._bytes = self._before = 0
        self._began = self._said = time.monotonic()

    def add(self, size: int, *, here: bool = False) -> None:
        """Count bytes; `here` says that an earlier run fetched them. Those of a file begun anew are taken off again."""
        with self._lock:
            self._bytes += size
            self._before += size if here else 0
            now = time.monotonic()
            if here or now - self._said < EVERY:
                return
            self._said = now
            line = self._line(max(now - self._began, 1e-9))
        say(f"{self._name}: {line}")

    def _line(self, seconds: float) -> str:
        speed = max(self._bytes - self._before, 0) / seconds
        rate = f"{measure(speed)}/s"
        if not self._total:
            return f"{measure(self._bytes)}, {rate}"
        left = f", {(self._total - self._bytes) / speed:.0f} s left" if speed else ""
        return f"{measure(self._bytes)} of {measure(self._total)} ({self._bytes / self._total:.0%}), {rate}{left}"


def say(line: str) -> None:
    """A line on standard output, at once."""
    print(line, flush=True)


def measure(size: float) -> str:
    """Bytes for people.

    >>> measure(812), measure(1_250_000)
    ('812 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
