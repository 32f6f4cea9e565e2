"""Groups of processes for tests: each is started once, on gloo, and runs many cases, since importing torch costs most.

A case is a function at the top of a test module. It runs on every rank at once, and what it returns (or raises) on each
comes back to the test:

    def norms(seed):  # on every rank
        ...
        return 1.0

    def test_norms(world):
        assert world(2).run(norms, 7) == [1.0, 1.0]
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[1]


class RankError(AssertionError):
    """A case failed on a rank; the text is that rank's traceback."""


class World:
    """`size` processes in one gloo group. After a case that failed they are started anew, since some may hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[subprocess.Popen[bytes], BinaryIO, BinaryIO]] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `case(*args, **kwargs)` on every rank and return what each returned, by rank."""
        if not self._ranks:
            self._start()
        job = pickle.dumps((case.__module__, case.__qualname__, args, kwargs))
        for _, _, out in self._ranks:
            _send(out, job)
        answers: list[Any] = []
        for rank, (process, into, _) in enumerate(self._ranks):
            data = _receive(into)
            fine, value = (False, f"the process ended with {process.wait()}") if data is None else pickle.loads(data)
            if not fine:
                self.close()
                raise RankError(f"rank {rank} of {self.size}: {value}")
            answers.append(value)
        return answers

    def close(self) -> None:
        """End the processes."""
        for process, into, out in self._ranks:
            process.kill()
            process.wait()
            into.close()
            out.close()
        self._ranks = []
        if self._store is not None:
            self._store.cleanup()

    def _start(self) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="luthier-world-")
        store = f"{self._store.name}/store"
        for rank in range(self.size):
            their_in, our_out = os.pipe()
            our_in, their_out = os.pipe()
            command = [sys.executable, "-m", "tests.world", store, str(rank), str(self.size)]
            environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank)}
            environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
            process = subprocess.Popen(
                [*command, str(their_in), str(their_out)], cwd=ROOT, env=environment, pass_fds=(their_in, their_out)
            )
            os.close(their_in)
            os.close(their_out)
            self._ranks.append((process, os.fdopen(our_in, "rb"), os.fdopen(our_out, "wb")))


@contextmanager
def worlds() -> Iterator[Callable[[int], World]]:
    """A function from size to a running world of that size, each started at its first use."""
    running: dict[int, World] = {}
    try:
        yield lambda size: running.setdefault(size, World(size))
    finally:
        for one in running.values():
            one.close()


def _send(file: BinaryIO, data: bytes) -> None:
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def _receive(file: BinaryIO) -> bytes | None:
    head = file.read(8)
    return file.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else None


def _serve(store: str, rank: int, size: int, into: BinaryIO, out: BinaryIO) -> None:
    """What each process does: join the group, then run one case after another until the pipe is closed."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while (data := _receive(into)) is not None:
        module, name, args, kwargs = pickle.loads(data)
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # it compiles so many forms of a function and no more: those of other cases do not count
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
    _serve(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        os.fdopen(int(sys.argv[4]), "rb"),
        os.fdopen(int(sys.argv[5]), "wb"),
    )
