"""A server of one's own: `luthier serve` as a process, and the official SDK pointed at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tinker

from tests.tinker.server.postgresql import options_for

KEY = "tml-a-key-of-the-tests"


class Served:
    """A server.

    Args:
        model: its base model.
        directory: of its books.
        more: further arguments of the command.
    """

    def __init__(self, model: str, directory: Path, *more: str, port: int = 0) -> None:
        self.model = model
        self.directory = directory
        self._more = more
        self.port = port
        self.log = directory.with_name(f"{directory.name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self._services: list[tinker.ServiceClient] = []
        self._rests: list[tinker.RestClient] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, on the port that it had, and return when it listens."""
        command = [sys.executable, "-m", "luthier", "serve", "--model", self.model, "--dir", str(self.directory)]
        command += ["--port", str(self.port), *options_for(self.directory), *self._more]
        reading, writing = os.pipe()
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writing, env=env)
        os.close(writing)
        copier = subprocess.Popen(["tee", "-a", str(self.log)], stdin=reading, stdout=subprocess.PIPE)
        os.close(reading)
        assert copier.stdout is not None
        lines = []
        for line in copier.stdout:
            lines.append(line.decode())
            told = json.loads(line) if line.startswith(b"{") else {}
            if told.get("message") == "listening":
                self.port = int(told["url"].rpartition(":")[2])
                break
        else:
            raise AssertionError("".join(lines))
        self._copier = copier

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As Ctrl-C and systemd do, when the clients have gone: the SDK leaves its sockets open otherwise."""
        for service in self._services:
            service.close("success").result()
        for rest in self._rests:
            rest.holder.run_coroutine_threadsafe(rest.holder.aclose()).result()
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait()
        assert self._copier.stdout is not None
        self._copier.stdout.close()
        self._copier.terminate()
        self._copier.wait()

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        """The official SDK's client of it."""
        self._services.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._services[-1]

    def rest(self, key: str = KEY) -> tinker.RestClient:
        """The official SDK's client of what is listed, without a session."""
        self._rests.append(tinker.RestClient(base_url=self.url, api_key=key))
        return self._rests[-1]


@contextmanager
def serving(model: str, directory: Path, *more: str) -> Iterator[Served]:
    """A server that is there for as long as the block."""
    served = Served(model, directory, *more)
    served.start()
    try:
        yield served
    finally:
        served.stop()


def ints(tokens: Sequence[int]) -> tinker.ModelInput:
    """Token ids as the SDK takes them."""
    return tinker.ModelInput.from_ints(list(tokens))
