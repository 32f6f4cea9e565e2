"""Processes that are started once and walk through many models: the reference, and groups of ranks.

Importing torch and Transformers costs most, so a group lives as long as it works. One that hangs or has lost a rank is
ended and started anew at the next call.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Refused(Exception):
    """The other side said in a sentence why it does not do this."""


class Failed(Exception):
    """A process raised, ended or did not answer.

    Attributes:
        trace: of the first rank that raised.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Group:
    """Processes that all get the same calls.

    Args:
        command: what to start, after `python -m`; gets the place of a file store, its rank and the number of ranks if
            `ranks` is given.
        ranks: how many; None for a single process that is no rank.
        log: a file for what they say on standard error.
        timeout: seconds to wait for an answer.
        arguments: more words for the command.
    """

    def __init__(
        self, command: str, *, ranks: int | None, log: Path, timeout: float, arguments: tuple[str, ...] = ()
    ) -> None:
        self._command, self._ranks, self._log = command, ranks, log
        self._timeout, self._arguments = timeout, arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._buffers: list[bytes] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Let every process do something; what the first answers.

        Raises:
            Refused: all of them refused with a reason.
            Failed: one raised, ended, or was not done in time. The group is then ended.
        """
        if not self._processes:
            self._start()
        line = (json.dumps({"call": name, "with": arguments}) + "\n").encode()
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            answers = self._answers()
        except (BrokenPipeError, Failed):
            self.close()
            raise
        errors = [answer for answer in answers if "error" in answer]
        if errors:
            if len({answer.get("error") for answer in answers}) > 1:
                self.close()  # they are no longer at the same place
            raise Failed(errors[0]["error"], errors[0]["trace"])
        refusals = [answer["refused"] for answer in answers if "refused" in answer]
        if refusals:
            if len(refusals) < len(answers):
                self.close()
                raise Failed(f"only some ranks refused: {refusals[0]}")
            raise Refused(refusals[0])
        answer: dict[str, Any] = answers[0]["answer"]
        return answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes = []
        if self._store is not None:
            self._store.cleanup()
            self._store = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        ranks = self._ranks or 1
        self._store = tempfile.TemporaryDirectory(prefix="luthier-group-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        for rank in range(ranks):
            command = [sys.executable, "-m", self._command]
            if self._ranks is not None:
                command += [f"{self._store.name}/store", str(rank), str(ranks), *self._arguments]
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            with open(self._log, "ab") as log:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            self._processes.append(process)
        self._buffers = [b""] * ranks

    def _answers(self) -> list[dict[str, Any]]:
        """An answer from each; of one that fails, without waiting long for the others."""
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    failed = [answer for answer in answers.values() if "error" in answer]
                    if failed:
                        raise Failed(failed[0]["error"], failed[0]["trace"])
                    raise Failed(f"no answer within {self._timeout:.0f} seconds")
                for key, _ in ready:
                    rank = key.data
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        code = self._processes[rank].wait()
                        raise Failed(f"rank {rank} ended with code {code}")
                    self._buffers[rank] += data
                    line, newline, rest = self._buffers[rank].partition(b"\n")
                    if newline:
                        answers[rank] = json.loads(line)
                        self._buffers[rank] = rest
                        if "error" in answers[rank]:
                            until = min(until, time.monotonic() + 5.0)
        return [answers[rank] for rank in range(len(self._processes))]


def reference(log: Path, timeout: float) -> Group:
    """The process of plain Transformers."""
    return Group("luthier.verify.reference", ranks=None, log=log, timeout=timeout)


def ranks(number: int, log: Path, timeout: float, *, device: str = "cpu", patience: float = 200.0) -> Group:
    """Ranks of a layout; `patience` is how long one waits for another in a collective."""
    return Group("luthier.verify.worker", ranks=number, log=log, timeout=timeout, arguments=(device, str(patience)))
