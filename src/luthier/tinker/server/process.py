"""The worker as the server sees it: a process that is started again when it dies, and calls that it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from luthier.errors import ModelError
from luthier.tinker.server.link import LinkClosed, ServerEnd

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
"""Seconds between two starts of a worker that keeps dying."""


class WorkerLost(Exception):
    """The worker ended before it answered.

    Args:
        guilty: whether it was at this very operation.
    """

    def __init__(self, guilty: bool) -> None:
        self.guilty = guilty
        super().__init__("the worker ended")


class Refused(Exception):
    """What the worker said is wrong with an operation: its user's mistake."""


class WorkerProcess:
    """The worker.

    Args:
        arguments: fields of `WorkerConfig`, but for the socket.
        log: where what it prints is kept.
        tokenizer: where it writes the base model's tokenizer.
        ranks: how many processes it is.
    """

    def __init__(self, arguments: dict[str, Any], log: Path, tokenizer: Path, *, ranks: int = 1) -> None:
        self._arguments = arguments
        group = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        self._command = [sys.executable, *group, "-m", "luthier.tinker.server.worker"]
        self._log = log
        self._tokenizer = tokenizer
        self._room = Path(tempfile.mkdtemp(prefix="luthier-"))  # short, since names of sockets are; ours alone
        self._process: asyncio.subprocess.Process | None = None
        self._end: ServerEnd | None = None
        self._calls: dict[str, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._begun: set[str] = set()
        self._ready = asyncio.Event()
        self.generation = 0
        """Counts workers; whatever was loaded into an earlier one is gone."""
        self.facts: dict[str, Any] = {}
        """What it said of the base model."""

    async def start(self) -> asyncio.Task[None]:
        """Start it, and return when it is ready.

        Returns:
            the task that starts it again whenever it dies.

        Raises:
            ModelError: it cannot load the model.
        """
        await self._launch()
        return asyncio.create_task(self._supervise())

    async def here(self) -> int:
        """Wait until there is a worker.

        Returns:
            its generation.
        """
        while self._end is None:
            await self._ready.wait()
        return self.generation

    async def call(
        self, number: str, head: dict[str, Any], payload: bytes = b"", *, generation: int | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Have something done.

        Args:
            number: of the call, unique among those in flight.
            head: the command and what it needs.
            payload: bytes for it.
            generation: of the worker that has got what the command is about; None where any will do.

        Raises:
            Refused: it cannot be done, as the worker says why.
            WorkerLost: try again.
        """
        here = await self.here()
        if generation is not None and generation != here:
            raise WorkerLost(guilty=False)
        assert self._end is not None
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        if head["command"] == "sample":
            self._begun.add(number)  # all texts grow at once
        self._end.send({"id": number, **head}, payload)
        answer, content = await future
        if not answer["ok"]:
            raise Refused(answer["error"])
        return answer, content

    def tell(self, head: dict[str, Any]) -> None:
        """Say something that needs no answer; nothing where no worker is there."""
        if self._end is not None:
            self._end.send({"id": "", **head})

    def forget(self, number: str) -> None:
        """Stop a sample; whoever waits for it gets `WorkerLost`."""
        if (future := self._calls.pop(number, None)) is not None:
            self._begun.discard(number)
            self.tell({"command": "cancel", "target": number})
            if not future.done():
                future.set_exception(WorkerLost(guilty=False))

    async def stop(self) -> None:
        """End it."""
        self._close()
        await self._end_process()
        shutil.rmtree(self._room, ignore_errors=True)

    async def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _launch(self) -> None:
        socket = self._room / "worker"
        socket.unlink(missing_ok=True)
        connected: asyncio.Future[ServerEnd] = asyncio.get_running_loop().create_future()

        def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result(ServerEnd(reader, writer))

        listener = await asyncio.start_unix_server(welcome, path=socket)
        arguments = self._arguments | {"socket": str(socket), "tokenizer_directory": str(self._tokenizer)}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                json.dumps(arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        gone: asyncio.Future[Any] = asyncio.create_task(self._process.wait())
        waited: list[asyncio.Future[Any]] = [connected, gone]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        listener.close()
        if not connected.done():
            raise ModelError("the worker ended before it was ready", where="--model", remedy=f"see {self._log}")
        gone.cancel()
        end = connected.result()
        try:
            head, _ = await end.receive()
        except LinkClosed:
            what = "the worker ended while it loaded the model"
            raise ModelError(what, where="--model", remedy=f"see {self._log}") from None
        if "failed" in head:
            raise ModelError(head["failed"])
        self.facts = head["ready"]
        self.generation += 1
        self._end = end
        self._ready.set()
        logger.info("worker ready", extra={"fields": {"pid": self._process.pid, **self.facts}})

    async def _supervise(self) -> None:
        pause = 0.5
        while True:
            if await self._listen():
                pause = 0.5
            logger.error("worker lost", extra={"fields": {"log": str(self._log)}})
            while True:
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                try:
                    await self._end_process()
                    await self._launch()
                except (ModelError, OSError) as error:
                    logger.error("worker does not start", extra={"fields": {"error": str(error)}})
                else:
                    break

    async def _listen(self) -> bool:
        """Take answers until the worker is gone; whether there was one."""
        assert self._end is not None
        answered = False
        try:
            while True:
                head, payload = await self._end.receive()
                if head.get("started"):
                    self._begun.add(head["id"])
                    continue
                self._begun.discard(head["id"])
                answered = True
                if (future := self._calls.pop(head["id"], None)) is not None and not future.done():
                    future.set_result((head, payload))
        except LinkClosed:
            self._close()
        return answered

    def _close(self) -> None:
        if self._end is not None:
            self._end.close()
        self._end = None
        self._ready.clear()
        calls, self._calls = self._calls, {}
        begun, self._begun = self._begun, set()
        for number, future in calls.items():
            if not future.done():
                future.set_exception(WorkerLost(number in begun))
