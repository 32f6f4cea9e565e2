"""The line at the bottom of a terminal that says how far things are; plain lines now and then where there is none."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Told = Callable[..., None]
"""told(done, total=None): how far a stage is."""

# Faster than the eye follows, slower than a terminal over a network chokes on.
_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 10.0
# A stage that took less is not worth a line in a log.
_WORTH_TELLING_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Terminal:
    """Standard error, which may end in a line that is drawn over and over.

    Whatever else is printed goes through `print`, so that it stands above that line instead of in it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._line = ""
        self._drawn = 0.0
        self._muted = False

    def mute(self) -> None:
        """Show no line from now on: another rank of the run draws it."""
        self.clear()
        self._muted = True

    @property
    def interactive(self) -> bool:
        return sys.stderr.isatty() and not self._muted

    def draw(self, line: str, *, force: bool = False) -> None:
        """Show a line in the place of the last one; on a terminal only."""
        with self._lock:
            now = time.monotonic()
            if not self.interactive or (not force and now - self._drawn < _REDRAW_SECONDS):
                return
            self._drawn = now
            self._line = line[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\x1b[2K{self._line}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._line:
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
                self._line = ""

    def print(self, text: str) -> None:
        """Print above the line."""
        with self._lock:
            if self._line:
                sys.stderr.write("\r\x1b[2K")
            sys.stderr.write(f"{text}\n{self._line}")
            sys.stderr.flush()


TERMINAL = Terminal()
"""The process's own."""


@contextmanager
def stage(name: str) -> Iterator[Told]:
    """Something that may take a while ("tokenising"), shown while it lasts.

    Where there is no terminal, its progress is logged every ten seconds, and its end when it took over two.

    Yields:
        told(done, total=None), to be called as often as one likes.
    """
    begin = time.monotonic()
    spoken = begin

    def told(done: int, total: int | None = None) -> None:
        nonlocal spoken
        text = f"{name}: {done:,} of {total:,}" if total else f"{name}: {done:,}"
        if TERMINAL.interactive:
            TERMINAL.draw(text)
        elif time.monotonic() - spoken > _PLAIN_SECONDS:
            spoken = time.monotonic()
            logger.info("%s", text)

    TERMINAL.draw(f"{name} ...", force=True)
    try:
        yield told
    finally:
        TERMINAL.clear()
    took = time.monotonic() - begin
    if took > _WORTH_TELLING_SECONDS:
        logger.info("%s took %s", name, duration(took))


def duration(seconds: float) -> str:
    """Seconds as one reads them.

    >>> duration(3.21), duration(83), duration(7384), duration(200000)
    ('3.2 s', '1:23', '2:03:04', '2 d 7:33')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def amount(count: float, unit: str) -> str:
    """A number with a prefix, bytes in powers of 1024.

    >>> amount(1536 * 2**20, "B"), amount(2.5e12, "FLOP/s"), amount(12, "B")
    ('1.5 GiB', '2.5 TFLOP/s', '12 B')
    """
    base, prefixes = (
        (1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi"]) if unit == "B" else (1000, ["", "k", "M", "G", "T", "P", "E"])
    )
    for prefix in prefixes:
        if abs(count) < base or prefix == prefixes[-1]:
            break
        count /= base
    return f"{count:.{0 if prefix == '' else 1}f} {prefix}{unit}"
