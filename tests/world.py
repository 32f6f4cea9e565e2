"""Groups of processes for tests: each is started once, on gloo, and runs many cases, since importing torch costs most.

Ranks are copies of two processes that have imported torch and Transformers, those of even and those of odd number: so
two ranks differ in the order of their sets, as ranks do that were started apart.

A case is a function at the top of a test module. It runs on every rank at once, and what it returns (or raises) on each
comes back to the test:

    def norms(seed):  # on every rank
        ...
        return 1.0

    def test_norms(world):
        assert world(2).run(norms, 7) == [1.0, 1.0]
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from luthier.launch import keep_modules

ROOT = Path(__file__).parents[1]


class RankError(AssertionError):
    """A case failed on a rank; the text is that rank's traceback."""


class Nursery:
    """Two processes that have imported what every case needs. They are copied to make ranks."""

    def __init__(self) -> None:
        self._parents: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def bear(self, store: str, rank: int, size: int, into: int, out: int) -> int:
        """A rank of a group of `size`; its process's number."""
        if not self._parents:
            for _ in range(2):
                ours, theirs = socket.socketpair()
                environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
                command = [sys.executable, "-m", "tests.world", str(theirs.fileno())]
                parent = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=(theirs.fileno(),))
                theirs.close()
                self._parents.append((parent, ours))
        _, line = self._parents[rank % 2]
        socket.send_fds(line, [pickle.dumps((store, rank, size))], [into, out])
        return int(pickle.loads(line.recv(100)))

    def bury(self, rank: int, number: int) -> int:
        """Wait for the end of a rank's process; its exit code."""
        _, line = self._parents[rank % 2]
        line.send(pickle.dumps(number))
        return int(pickle.loads(line.recv(100)))

    def close(self) -> None:
        for parent, line in self._parents:
            line.close()
            parent.wait()
        self._parents = []


class World:
    """`size` processes in one gloo group. After a case that failed they are started anew, since some may hang."""

    def __init__(self, size: int, nursery: Nursery) -> None:
        self.size = size
        self._nursery = nursery
        self._ranks: list[tuple[int, BinaryIO, BinaryIO]] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `case(*args, **kwargs)` on every rank and return what each returned, by rank."""
        if not self._ranks:
            self._start()
        job = pickle.dumps((case.__module__, case.__qualname__, args, kwargs))
        for _, _, out in self._ranks:
            _send(out, job)
        answers: list[Any] = []
        for rank, (_, into, _) in enumerate(self._ranks):
            data = _receive(into)
            fine, value = (False, None) if data is None else pickle.loads(data)
            if not fine:
                codes = self.close()
                raise RankError(f"rank {rank} of {self.size}: {value or f'the process ended with {codes[rank]}'}")
            answers.append(value)
        return answers

    def close(self) -> list[int]:
        """End the processes; their exit codes."""
        for number, _, _ in self._ranks:
            os.kill(number, signal.SIGKILL)  # a process that has ended has its number until it is buried
        codes = []
        for rank, (number, into, out) in enumerate(self._ranks):
            codes.append(self._nursery.bury(rank, number))
            into.close()
            out.close()
        self._ranks = []
        if self._store is not None:
            self._store.cleanup()
        return codes

    def _start(self) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="luthier-world-")
        for rank in range(self.size):
            their_in, our_out = os.pipe()
            our_in, their_out = os.pipe()
            number = self._nursery.bear(f"{self._store.name}/store", rank, self.size, their_in, their_out)
            os.close(their_in)
            os.close(their_out)
            self._ranks.append((number, os.fdopen(our_in, "rb"), os.fdopen(our_out, "wb")))


@contextmanager
def worlds() -> Iterator[Callable[[int], World]]:
    """A function from size to a running world of that size, each started at its first use."""
    running: dict[int, World] = {}
    nursery = Nursery()
    try:
        yield lambda size: running.setdefault(size, World(size, nursery))
    finally:
        for one in running.values():
            one.close()
        nursery.close()


def _send(file: BinaryIO, data: bytes) -> None:
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def _receive(file: BinaryIO) -> bytes | None:
    head = file.read(8)
    return file.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else None


def _parent(line: socket.socket) -> None:
    """What a process of the nursery does: copy itself, and wait for copies, until the line is closed."""
    gc.disable()
    import transformers.modeling_utils  # noqa: F401

    from luthier.recipes import methods  # noqa: F401

    keep_modules()
    gc.enable()
    while True:
        data, pipes, _, _ = socket.recv_fds(line, 10_000, 2)
        if not data:
            return
        told = pickle.loads(data)
        if isinstance(told, int):
            _, status = os.waitpid(told, 0)
            line.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
            continue
        number = os.fork()
        if not number:
            line.close()
            _serve(*told, os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb"))
            return
        for pipe in pipes:
            os.close(pipe)
        line.send(pickle.dumps(number))


def _serve(store: str, rank: int, size: int, into: BinaryIO, out: BinaryIO) -> None:
    """What each rank does: join the group, then run one case after another until the pipe is closed."""
    import datetime

    import numpy as np
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    np.random.seed()  # else the copies draw alike
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while (data := _receive(into)) is not None:
        module, name, args, kwargs = pickle.loads(data)
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # it compiles so many forms of a function and no more: those of other cases do not count
        gc.collect()
        keep_modules()  # as between the files of tests
        try:
            case: Any = importlib.import_module(module)
            for part in name.split("."):
                case = getattr(case, part)
            answer = (True, case(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        _send(out, pickle.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    _parent(socket.socket(fileno=int(sys.argv[1])))
