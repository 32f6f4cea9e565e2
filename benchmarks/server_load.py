"""How the server bears many clients that wait: 2,000 polls held at once, and 200 samples in flight all the time.

    python benchmarks/server_load.py [--seconds 180] [--database postgresql://...]

What the 2,000 wait for never comes, so each poll is held as long as the server holds any and then sent again; all are
answered at once in the end, when the session is closed. When an operation ended is what the server's log says, so
lateness is the time from there until the client has the whole answer. Leaves with 1 where an answer was an error or
over 2 s late, or where memory grew by over 10 % after the first minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

KEY = "tml-load"
MODEL = "debug:llama"
POLLS, SAMPLES, MODELS = 2000, 200, 10
HOLD_SECONDS, COME_SECONDS = 25.0, 10.0
MOST_LATE, MOST_GROWTH = 2.0, 1.10


class Connection:
    """A client's connection: HTTP/1.1 by hand, since two thousand clients of a library need more of the machine than
    the server does.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send JSON; returns status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        content = json.dumps(body).encode()
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(told.partition("content-length: ")[2].partition("\r\n")[0] or 0)
        return int(told.split()[1]), await reader.readexactly(length)

    async def json(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON; returns JSON, which must be no error."""
        code, content = await self.post(path, body)
        if code != 200:
            raise RuntimeError(f"{path}: {code} {content!r}")
        return json.loads(content)


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        errors: answers that should not have been.
        held: seconds of each poll that ended without a result.
        answered: operation, and when its result was there (seconds since the epoch).
        memory: seconds since the start, and resident bytes of the server and of its worker.
        waiting: polls that are held now; most: the most that there were.
    """

    errors: list[str] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    answered: list[tuple[str, float]] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    waiting: int = 0
    most: int = 0
    is_over: bool = False


class Server:
    """The server as a process; notes when each operation ended.

    Args:
        directory: of its books.
        more: further arguments.
    """

    def __init__(self, directory: Path, more: list[str]) -> None:
        command = [sys.executable, "-m", "luthier", "serve", "--model", MODEL, "--precision", "fp32", "--port", "0"]
        command += ["--dir", str(directory), *more]
        self.ended: dict[str, float] = {}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            told = json.loads(line) if line.startswith(b"{") else {}
            if told.get("message") == "listening":
                self.port = int(told["url"].rpartition(":")[2])
                break
        else:
            raise RuntimeError("the server did not start")
        threading.Thread(target=self._read, daemon=True).start()

    def memory(self) -> tuple[int, int]:
        """Resident bytes of the server and of its worker."""
        server = psutil.Process(self.process.pid)
        return server.memory_info().rss, sum(one.memory_info().rss for one in server.children())

    def cpu(self) -> float:
        """CPU seconds of the server alone, without its worker's."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b'"operation"' in line:
                told = json.loads(line)
                self.ended[told["operation"]] = datetime.fromisoformat(told["time"]).timestamp()


async def come(work: Coroutine[Any, Any, None]) -> None:
    """Let a client come at some moment of the first seconds, as clients do."""
    await asyncio.sleep(random.uniform(0, COME_SECONDS))
    await work


async def poll(connection: Connection, request: str, seen: Seen) -> None:
    """Wait for a result as the SDK does."""
    while True:
        start = time.time()
        seen.waiting += 1
        seen.most = max(seen.most, seen.waiting)
        code, content = await connection.post("retrieve_future", {"request_id": request, "allow_metadata_only": True})
        seen.waiting -= 1
        now = time.time()
        if code == 408:
            seen.held.append(now - start)
            continue
        seen.answered.append((request, now))
        if code != 200 or (b'"error"' in content and not seen.is_over):
            seen.errors.append(f"{request}: {code} {content[:200]!r}")
        return


async def sample(connection: Connection, sampler: str, numbers: Any, seen: Seen) -> None:
    """One sample after the other."""
    while not seen.is_over:
        number = next(numbers)
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 14, 15, 9, 26, 5]}]},
            "sampling_params": {"max_tokens": 100 + number % 100, "stop": [], "temperature": 1.0},
        }
        told = await connection.json("asample", body)
        await poll(connection, told["request_id"], seen)


async def load(server: Server, seconds: float, seen: Seen) -> None:
    """All clients at once."""
    first = Connection(server.port)
    sessions = [
        (await first.json("create_session", {"tags": [], "sdk_version": "0.38.0", "user_metadata": {}}))["session_id"]
        for _ in range(2)
    ]
    kept, sampling = sessions
    waiting = []
    for number in range(MODELS):
        body = {"session_id": kept, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}}
        model = (await first.json("create_model", body))["model_id"]
        for step in range(POLLS // MODELS // 10):  # number 1 never comes
            told = await first.json("optim_step", {"model_id": model, "seq_id": 2 + step, "adam_params": {}})
            waiting.append(told["request_id"])
    body = {"session_id": sampling, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await first.json("create_sampling_session", body))["sampling_session_id"]
    numbers = iter(range(1 << 40))
    start = time.monotonic()
    tasks = [poll(Connection(server.port), waiting[one % len(waiting)], seen) for one in range(POLLS)]
    tasks += [sample(Connection(server.port), sampler, numbers, seen) for _ in range(SAMPLES)]
    running = [asyncio.create_task(come(task)) for task in tasks]
    while (passed := time.monotonic() - start) < seconds:
        seen.memory.append((passed, *server.memory()))
        for session in sessions:
            await first.json("session_heartbeat", {"session_id": session})
        await asyncio.sleep(5)
    seen.memory.append((passed, *server.memory()))
    seen.is_over = True
    for session in sessions:
        await first.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    await asyncio.gather(*running)


def report(server: Server, seen: Seen, seconds: float, cpu: float) -> bool:
    """Print what was seen; whether all of it is well."""
    late = sorted(now - server.ended[request] for request, now in seen.answered)
    over = sorted(max(0.0, held - HOLD_SECONDS) for held in seen.held)
    base = next(one for one in seen.memory if one[0] >= min(60.0, seconds / 2))
    growth = [last / first for first, last in zip(base[1:], seen.memory[-1][1:], strict=True)]
    mebi = 1 << 20
    rows = [
        ("polls held at once, at most", f"{seen.most:,}"),
        ("polls held to the end, and asked again", f"{len(over):,}"),
        ("of those late by, s: median, 99 %, most", _spread(over)),
        ("results fetched", f"{len(late):,}"),
        ("of those late by, s: median, 99 %, most", _spread(late)),
        ("errors", f"{len(seen.errors)}"),
        ("server, MiB: after the first minute, at the end", _memory(base[1], seen.memory[-1][1], mebi)),
        ("worker, MiB: after the first minute, at the end", _memory(base[2], seen.memory[-1][2], mebi)),
        ("CPU seconds of the server, without its worker", f"{cpu:.0f} in {seconds:.0f} s"),
    ]
    print("\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]))
    for error in seen.errors[:5]:
        print(error)
    return not seen.errors and max([*late, *over]) <= MOST_LATE and max(growth) <= MOST_GROWTH


def _spread(values: list[float]) -> str:
    return ", ".join(f"{values[min(len(values) - 1, int(share * len(values)))]:.2f}" for share in (0.5, 0.99, 1.0))


def _memory(first: int, last: int, unit: int) -> str:
    return f"{first / unit:.0f}, {last / unit:.0f} ({last / first - 1:+.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--database")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        more = [] if given.database is None else ["--database", given.database]
        server = Server(Path(directory) / "server", more)
        try:
            seen, before = Seen(), server.cpu()
            asyncio.run(load(server, given.seconds, seen))
            return 0 if report(server, seen, given.seconds, server.cpu() - before) else 1
        finally:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    sys.exit(main())
