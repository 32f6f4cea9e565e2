"""Where ranks write: each to a log of its own, rank 0 to the terminal as well."""

from __future__ import annotations

import fcntl
import os
import re
import termios
import threading
import tty
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from luthier.launch.place import ATTEMPT, START
from luthier.launch.records import ERROR_FILE, OUTCOME
from luthier.launch.world import LAUNCHER

# What comes before one of these on a line has been drawn over.
_REDRAWN = re.compile(rb"\r|\x1b\[2K")
_CHUNK = 65536


class RankLogs(LogsSpecs):
    """Log files of the ranks of this machine, and the files through which they answer.

    Args:
        directory: of the logs: `rank-3.txt`, and `rank-3.restart-1.txt` after a restart.
        scratch: an empty directory for answers and errors.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory
        self._scratch = scratch
        self._shown: _Shown | None = None
        self.attempt = -1
        self.start = ""
        """A name of the start that comes next."""
        self.logs: dict[int, Path] = {}
        """By local rank, of the newest attempt; so the next."""
        self.answers: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where each rank that is about to start shall write; called by torch for every attempt."""
        self.close()
        self.attempt += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        self.logs, self.answers, errors, streams = {}, {}, {}, {}
        for local, environment in envs.items():
            rank = environment["RANK"]
            restart = f".restart-{self.attempt}" if self.attempt else ""
            self.logs[local] = self._directory / f"rank-{rank}{restart}.txt"
            self.answers[local] = self._scratch / f"answer-{self.attempt}-{local}.json"
            errors[local] = str(self._scratch / f"error-{self.attempt}-{local}.json")
            environment[OUTCOME] = str(self.answers[local])
            environment[ERROR_FILE] = errors[local]
            environment[ATTEMPT] = str(self.attempt)
            environment[START] = self.start
            environment[LAUNCHER] = str(os.getpid())
            streams[local] = str(self.logs[local])
            if rank == "0":
                self._shown = _Shown(self.logs[local])
                streams[local] = self._shown.path
        # Ranks send their standard output the way of their standard error, as the first thing they do.
        return LogsDest(stdouts=dict.fromkeys(envs, os.devnull), stderrs=streams, error_files=errors)

    def close(self) -> None:
        """Write what is left of rank 0's."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    def add(self, local: int, text: str) -> None:
        """Write at the end of the log of a rank that has ended."""
        with self.logs[local].open("a", encoding="utf-8") as log:
            log.write(text)

    def end_of(self, local: int, lines: int = 20) -> str:
        """The last lines of a rank's log."""
        path = self.logs[local]
        if not path.is_file():
            return ""
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class _Shown:
    """Rank 0's standard error: shown as it comes, and kept without the lines that were drawn over.

    Where ours is a terminal, rank 0 gets one too, so that it draws its progress.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        if os.isatty(2):
            self._read, self._write = os.openpty()
            tty.setraw(self._write)
            fcntl.ioctl(self._write, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
            self.path = os.ttyname(self._write)
        else:
            self._read, self._write = os.pipe()
            self.path = f"/dev/fd/{self._write}"
        self._thread = threading.Thread(target=self._copy, name="rank 0", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the rest; a process that the rank left behind is not waited for."""
        os.close(self._write)
        self._thread.join(timeout=5)

    def _copy(self) -> None:
        shown = True
        rest = b""
        with self._log.open("wb") as log:
            while data := self._next():
                if shown:
                    shown = _show(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    log.write(_last_drawn(line) + b"\n")
                log.flush()
            log.write(_last_drawn(rest))
        os.close(self._read)

    def _next(self) -> bytes:
        try:
            return os.read(self._read, _CHUNK)
        except OSError:  # how a terminal says that nobody has it open any more
            return b""


def _last_drawn(line: bytes) -> bytes:
    return _REDRAWN.split(line.removesuffix(b"\r"))[-1]


def _show(data: bytes) -> bool:
    """Pass on to our own standard error; False when nobody listens any more."""
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return False
    return True
