"""Where a command's answer or error leaves the process: as text or JSON, and as one voice when there are many ranks."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any, TextIO

from luthier import launch
from luthier.cli.frame import Answer, entries, to_json
from luthier.errors import EXIT_USER_ERROR, UserError
from luthier.launch.records import OUTCOME, tell_answer, tell_failure


def discard(out: TextIO) -> None:
    """Let what is not written yet go nowhere; Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _complain(text: str) -> None:
    """Say what went wrong; where standard error cannot be written, the exit code says it alone."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


class Border:
    """How this process says what it has to say.

    A process of its own prints. Of several ranks, the first prints the answer; those of our launcher leave answer and
    failure to it, so that it prints them once, and the failure that came first instead of those that followed.

    Args:
        as_json: print one JSON object instead of text.

    Attributes:
        launched: whether this is a rank of our launcher.
        rank: among all; 0 for a process of its own.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.launched = OUTCOME in os.environ
        try:
            here = launch.place(os.environ)
        except UserError:  # whoever needs to know will say so
            here = None
        self.rank = here.rank if here is not None else 0

    def answer(self, answer: Answer, out: TextIO) -> int:
        """Print an answer; returns what to leave with.

        Ranks that have nothing to print leave with 0: whoever started them would end the first of them, too, if another
        left with something else before.
        """
        if self.launched:
            text = io.StringIO()
            if self.rank == 0:
                self._print(answer, text)
            tell_answer(answer.code, text.getvalue())
            return 0
        if self.rank:
            return 0
        self._print(answer, out)
        return answer.code

    def pass_on(self, outcome: launch.Outcome, out: TextIO) -> int:
        """Print what the ranks that this process started have left."""
        failure = outcome.failure
        if failure is None:
            out.write(outcome.text)
            out.flush()
            return outcome.code
        if failure.code == EXIT_USER_ERROR or failure.kind == "Interrupted":
            return self.fail(failure.message, failure.details, failure.kind, outcome.code, out)
        _complain(failure.report())
        self._error_object(failure.message, {}, failure.kind, out)
        return outcome.code

    def fail(self, message: str, details: dict[str, Any], kind: str, code: int, out: TextIO) -> int:
        """Print a sentence; returns what to leave with."""
        tell_failure(launch.Failure(kind, message, code, details))
        if not self.launched or self.rank:
            for line in message.splitlines() or [kind]:
                line = line.removeprefix("error: ")  # that of a job's log, which is told along
                _complain(f"error: {line}" if code == EXIT_USER_ERROR else line)
        self._error_object(message, details, kind, out)
        return code

    def crash(self, error: Exception, out: TextIO) -> int:
        """Print the traceback of what is nobody's mistake but ours."""
        message = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        tell_failure(launch.Failure("InternalError", message, 1, traceback=trace))
        if not self.launched or self.rank:
            _complain(trace.removesuffix("\n"))
        self._error_object(message, {}, "InternalError", out)
        return 1

    def _error_object(self, message: str, details: dict[str, Any], kind: str, out: TextIO) -> None:
        if self.as_json and not self.launched and not self.rank:
            try:
                print(to_json({"error": {"kind": kind, "message": message, **details}}), file=out, flush=True)
            except OSError:  # what has gone wrong may be this very stream: a full disk, a reader that has left
                discard(out)

    def _print(self, answer: Answer, out: TextIO) -> None:
        if self.as_json:
            print(to_json(answer.result), file=out, flush=True)
            return
        console = None
        for line in entries(answer.result) if answer.lines is None else answer.lines:
            if isinstance(line, str):
                print(line, file=out)
                continue
            if console is None:
                from rich.console import Console

                console = Console(file=out, highlight=False, soft_wrap=True)
            console.print(line)
        out.flush()
