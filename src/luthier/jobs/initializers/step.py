"""What initializers and exporter have in common as processes: where they work, and how they end."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from luthier.errors import EXIT_USER_ERROR, UserError
from luthier.jobs.storage import SECRETS, Hider

INTERRUPTED, TERMINATED = 130, 143
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def workspace(environment: Mapping[str, str]) -> Path:
    """The directory that all steps of a job share."""
    return Path(environment.get("LUTHIER_WORKSPACE") or "/workspace").absolute()


def run_step(step: Callable[[Mapping[str, str]], int]) -> NoReturn:
    """Run a step and leave with what it returns, 2 for what its user can mend, 1 for a fault of Luthier's own.

    The step gets the environment; processes that it starts and libraries that look around find no secrets in theirs.
    Whatever is printed of an error has them hidden.
    """
    environment = dict(os.environ)
    for name in SECRETS:
        os.environ.pop(name, None)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are not UTF-8
    # The first process of a container passes over signals that it has no handler for.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(TERMINATED))
    hide = Hider(environment)

    def crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _leave(_tell(hide("".join(traceback.format_exception(kind, error, trace))), 1, one_line=False))

    sys.excepthook = crash  # a fault of Luthier's own
    try:
        code = step(environment)
    except UserError as error:
        code = _tell(f"error: {hide(str(error))}", EXIT_USER_ERROR)
    except KeyboardInterrupt:
        code = _tell("interrupted", INTERRUPTED)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename is not None else "the disk"
        if error.filename is None and error.errno not in _FULL:
            raise
        remedy = "; free some space" if error.errno in _FULL else ""
        code = _tell(hide(f"error: {place}: {error.strerror}{remedy}"), EXIT_USER_ERROR)
    _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for a server that does not answer would hold the process back


def _tell(text: str, code: int, *, one_line: bool = True) -> int:
    print(" ".join(text.split()) if one_line else text, file=sys.stderr, flush=True)
    return code
