"""The process that computes: one base model, and over it as many models in training and samplers as clients ask for.

It runs one operation on weights at a time, in the order in which they come, and lets texts grow in between: as long as
the operation before took, so that neither starves. Whatever is wrong with what a client sent ends that operation; any
other error ends the process, and the server starts another, which replays.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luthier.adapters import beside
from luthier.engine.adopt import adopt
from luthier.engine.build import Precision, choose_device, choose_precision
from luthier.errors import ModelError, UserError
from luthier.hf.load import DTYPES, load_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.tinker import saved
from luthier.tinker.adapters import apply_lora
from luthier.tinker.client import LocalTrainingClient
from luthier.tinker.server import wire
from luthier.tinker.server.link import WorkerEnd
from luthier.tinker.server.pool import SamplerPool
from luthier.tinker.types import AdamParams, LoraConfig

logger = logging.getLogger(__name__)

_SHORTEST_TURN = 0.05
"""Seconds that texts grow for between two operations, if there are any texts."""

Answer = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is started with.

    Attributes:
        socket: of the server.
        model: the base model, as the command line names it.
        precision, device: as `luthier train` takes them; chosen for the machine when None.
        tokens_per_microbatch: how many positions run at once.
        slots: how many texts grow side by side.
    """

    socket: Path
    model: str
    precision: Precision | None
    device: str | None
    tokens_per_microbatch: int
    slots: int


class Worker:
    """Executes commands.

    Args:
        config: what it was started with.
        link: to the server.
    """

    def __init__(self, config: WorkerConfig, link: WorkerEnd) -> None:
        self._config = config
        self._link = link
        self._source = resolve(config.model)
        where = choose_device(config.device)
        self._dtype = DTYPES[choose_precision(config.precision, where)]
        self._base: Any = load_model(self._source, dtype=self._dtype, device=where)
        self._base.requires_grad_(False)
        self._tokenizer: Any
        try:
            self._tokenizer = load_tokenizer(self._source)
        except ModelError:
            self._tokenizer = None
        self._clients: dict[str, LocalTrainingClient] = {}
        self._pool = SamplerPool(self._base, self._tokenizer, slots=config.slots)
        self._waiting: deque[tuple[dict[str, Any], bytes]] = deque()
        self._commands: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
            "create": self._create,
            "restore": self._restore,
            "unload": self._unload,
            "forward_backward": self._forward_backward,
            "break": self._break,
            "optim_step": self._optim_step,
            "save": self._save,
            "save_sampler": self._save_sampler,
            "load_sampler": self._load_sampler,
            "drop_sampler": self._drop_sampler,
        }

    def describe(self) -> dict[str, Any]:
        """What the server tells clients of the base model."""
        config = self._base.config.get_text_config()
        return {
            "arch": type(self._base).__name__,
            "context": getattr(config, "max_position_embeddings", None),
            "vocabulary": int(self._base.get_input_embeddings().weight.shape[0]),
            "parameters": sum(parameter.numel() for parameter in self._base.parameters()),
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": str(self._base.device),
        }

    def tokenizer_id(self, directory: Path) -> str | None:
        """What clients load the tokenizer by: the Hub's name, or a directory; None where there is no tokenizer.

        Args:
            directory: where to write its files if they are nowhere else.
        """
        if self._tokenizer is None:
            return None
        if self._source.kind == "hub":
            return self._source.repo
        if self._source.kind == "directory" and self._source.path is not None:
            return str(self._source.path.resolve())
        self._tokenizer.save_pretrained(directory)
        return str(directory.resolve())

    def run(self) -> None:
        """Execute what comes until the server is gone."""
        turn = _SHORTEST_TURN
        while True:
            self._listen(wait=not self._waiting and not self._pool.busy)
            if self._waiting:
                head, payload = self._waiting.popleft()
                started = time.monotonic()
                self._execute(head, payload)
                turn = max(_SHORTEST_TURN, time.monotonic() - started)
            end = time.monotonic() + turn
            while self._pool.busy and (not self._waiting or time.monotonic() < end):
                for number, answer in self._pool.step():
                    self._answer(number, answer)
                self._listen(wait=False)

    def _listen(self, *, wait: bool) -> None:
        """Take in what has come: samples join at once, the rest waits for its turn."""
        while (message := self._link.receive(wait=wait)) is not None:
            head, payload = message
            if head["command"] == "sample":
                self._join(head, payload)
            elif head["command"] == "cancel":
                self._pool.cancel(head["target"])
            else:
                self._waiting.append(message)
            wait = False

    def _join(self, head: dict[str, Any], payload: bytes) -> None:
        try:
            self._pool.submit(head["id"], head["sampler"], wire.parse_sample(payload), head["seed"])
        except UserError as error:
            self._refuse(head["id"], error)

    def _execute(self, head: dict[str, Any], payload: bytes) -> None:
        self._link.send({"id": head["id"], "started": True})
        started = time.monotonic()
        try:
            answer = self._commands[head["command"]](head, payload)
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

    # --- models in training ---------------------------------------------------------------------------------------

    def _create(self, head: dict[str, Any], payload: bytes) -> Answer:
        """A model over the base: with adapters, or for one that trains whole with a copy of all weights."""
        if head["lora"] is not None:
            model = beside(self._base)
            report = apply_lora(model, LoraConfig(**head["lora"]))
        else:
            model = load_model(self._source, dtype=self._dtype, device=self._base.device)
            report = None
        state = adopt(model, lora=report, source=self._source, seed=head["seed"])
        state.tokenizer = self._tokenizer
        self._clients[head["model"]] = LocalTrainingClient(
            state, tokens_per_microbatch=self._config.tokens_per_microbatch
        )
        return {}, b""

    def _restore(self, head: dict[str, Any], payload: bytes) -> Answer:
        client = self._clients[head["model"]]
        call = client.load_state_with_optimizer if head["optimizer"] else client.load_state
        call(Path(head["directory"])).result()
        return {}, b""

    def _unload(self, head: dict[str, Any], payload: bytes) -> Answer:
        self._clients.pop(head["model"], None)
        return {}, b""

    def _forward_backward(self, head: dict[str, Any], payload: bytes) -> Answer:
        client = self._clients[head["model"]]
        request = wire.parse_forward_backward(payload)
        call = client.forward if request.forward_only else client.forward_backward
        try:
            output = call(wire.rows_of(request), request.loss_fn, wire.settings_of(request)).result()
        except UserError as error:
            if not request.forward_only:
                client.refuse_step(str(error))
            raise
        return {"media": wire.PROTOBUF}, wire.forward_backward_output(output)

    def _break(self, head: dict[str, Any], payload: bytes) -> Answer:
        """A call of forward_backward that never came, or was refused: no step is taken over it."""
        self._clients[head["model"]].refuse_step(head["error"])
        return {}, b""

    def _optim_step(self, head: dict[str, Any], payload: bytes) -> Answer:
        response = self._clients[head["model"]].optim_step(AdamParams(**head["adam"])).result()
        return {}, wire.as_json({"metrics": response.metrics, "type": "optim_step"})

    def _save(self, head: dict[str, Any], payload: bytes) -> Answer:
        client, directory = self._clients[head["model"]], Path(head["directory"])
        directory.parent.mkdir(parents=True, exist_ok=True)
        whole = client.state.lora is None
        saved.save(client.state, directory, overwrite=True, adapters_only=not whole)
        return {"bytes": _size(directory)}, b""

    # --- samplers -------------------------------------------------------------------------------------------------

    def _save_sampler(self, head: dict[str, Any], payload: bytes) -> Answer:
        """Files of PEFT, and unless the files are all that is wanted a sampler that has these weights."""
        client = self._clients[head["model"]]
        size = None
        if head["directory"] is not None:
            directory = Path(head["directory"])
            directory.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)  # of a server that was killed before it knew
            saved.save_for_sampler(client.state, directory)
            size = _size(directory)
        if head["sampler"] is not None:
            self._pool.add(head["sampler"], client.model, live=head["live"])
        return {"bytes": size}, b""

    def _load_sampler(self, head: dict[str, Any], payload: bytes) -> Answer:
        if head["model"] is not None:
            self._pool.add(head["sampler"], self._clients[head["model"]].model, live=True)
        else:
            model = saved.load_for_sampler(self._base, Path(head["directory"]))
            self._pool.add(head["sampler"], model, live=True)  # nobody else has it
        return {}, b""

    def _drop_sampler(self, head: dict[str, Any], payload: bytes) -> Answer:
        self._pool.remove(head["sampler"])
        return {}, b""


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main(arguments: str) -> None:
    """Be a worker until the server is gone.

    Args:
        arguments: JSON: the fields of `WorkerConfig`, and as `tokenizer_directory` where to write the base model's.
    """
    given = json.loads(arguments)
    tokenizer = Path(given.pop("tokenizer_directory"))
    config = WorkerConfig(**given | {"socket": Path(given["socket"])})
    # A server that was killed leaves no order to stop, and the next one starts its own worker.
    link = WorkerEnd(config.socket, closed=lambda: os._exit(0))
    try:
        worker = Worker(config, link)
    except UserError as error:
        link.send({"failed": str(error)})
        sys.exit(2)
    link.send({"ready": worker.describe() | {"tokenizer_id": worker.tokenizer_id(tokenizer)}})
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1])
