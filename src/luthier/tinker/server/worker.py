"""The process that computes, or on a layout the processes: of these rank 0 speaks with the server and tells the others.

It runs one operation on weights at a time, in the order in which they come, and lets texts grow in between: as long as
the operation before took, so that neither starves. Whatever is wrong with what a client sent ends that operation; any
other error ends the process, and the server starts another, which replays.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from luthier import launch
from luthier.engine.build import choose_device
from luthier.errors import UserError
from luthier.hf.together import rank_in, tell
from luthier.tinker.server import wire
from luthier.tinker.server.bench import Answer, Bench, WorkerConfig
from luthier.tinker.server.link import Message, WorkerEnd

_SHORTEST_TURN = 0.05
"""Seconds that texts grow for between two operations, if there are any texts."""
_BEAT = 60.0
"""Seconds after which ranks that wait for an operation are told that there is none, lest they give up."""
_NOTHING: Message = ({"command": "nothing"}, b"")


class Worker:
    """Rank 0: takes commands from the server, and answers.

    Args:
        bench: executes them.
        link: to the server.
        group: of all ranks; None for one process.
    """

    def __init__(self, bench: Bench, link: WorkerEnd, group: Any) -> None:
        self._bench = bench
        self._link = link
        self._group = group
        self._waiting: deque[Message] = deque()
        self._told = time.monotonic()

    def run(self) -> None:
        """Execute what comes until the server is gone."""
        turn = _SHORTEST_TURN
        while True:
            self._listen(wait=not self._waiting and not self._bench.is_sampling)
            if self._waiting:
                head, payload = self._waiting.popleft()
                started = time.monotonic()
                self._execute(head, payload)
                turn = max(_SHORTEST_TURN, time.monotonic() - started)
            end = time.monotonic() + turn
            while self._bench.is_sampling and (not self._waiting or time.monotonic() < end):
                for number, answer in self._bench.pool.step():
                    self._answer(number, answer)
                self._listen(wait=False)

    def _listen(self, *, wait: bool) -> None:
        """Take in what has come: samples join at once, the rest waits for its turn."""
        if time.monotonic() - self._told > _BEAT:
            self._tell(_NOTHING)
        while (message := self._link.receive(_BEAT if wait else 0.0)) is not None:
            head, payload = message
            if head["command"] == "sample":
                self._join(head, payload)
            elif head["command"] == "cancel":
                self._bench.pool.cancel(head["target"])
            else:
                self._waiting.append(message)
            wait = False

    def _join(self, head: dict[str, Any], payload: bytes) -> None:
        try:
            self._bench.pool.submit(head["id"], head["sampler"], wire.parse_sample(payload), head["seed"])
        except UserError as error:
            self._refuse(head["id"], error)

    def _execute(self, head: dict[str, Any], payload: bytes) -> None:
        self._link.send({"id": head["id"], "started": True})
        started = time.monotonic()
        try:
            self._tell((head, payload))
            answer = self._bench.commands[head["command"]](head, payload)
        except UserError as error:
            self._refuse(head["id"], error)
            return
        answer[0]["seconds"] = time.monotonic() - started
        self._answer(head["id"], answer)

    def _answer(self, number: str, answer: Answer | UserError) -> None:
        if isinstance(answer, UserError):
            self._refuse(number, answer)
        else:
            self._link.send({"id": number, "ok": True, **answer[0]}, answer[1])

    def _refuse(self, number: str, error: UserError) -> None:
        self._link.send({"id": number, "ok": False, "error": str(error)})

    def _tell(self, message: Message) -> None:
        """Let all ranks do the same."""
        self._told = time.monotonic()
        tell(message, self._group)


def follow(bench: Bench, group: Any) -> None:
    """Another rank: do what rank 0 says. What is wrong with an operation is wrong on all ranks, and rank 0 answers."""
    while True:
        head, payload = tell(None, group)
        if head["command"] != "nothing":
            with contextlib.suppress(UserError):
                bench.commands[head["command"]](head, payload)


def main(arguments: str) -> None:
    """Be a worker until the server is gone.

    Args:
        arguments: JSON: the fields of `WorkerConfig`.
    """
    given = json.loads(arguments)
    paths = {key: Path(given[key]) for key in ("socket", "tokenizer_directory")}
    config = WorkerConfig(**given | paths)
    here = launch.place(os.environ)
    link = None
    if here is None or here.rank == 0:
        # A server that was killed leaves no order to stop, and the next one starts its own worker.
        link = WorkerEnd(config.socket, closed=lambda: os._exit(0))
    try:
        with launch.join(choose_device(config.device)) as device:
            group = dist.group.WORLD if dist.is_initialized() else None
            bench = Bench(config, device, rank_in(group))
            if link is None:
                follow(bench, group)
            else:
                link.send({"ready": bench.describe()})
                Worker(bench, link, group).run()
    except UserError as error:
        if link is None:
            raise
        link.send({"failed": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1])
