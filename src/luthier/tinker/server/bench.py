"""What operations do: one base model, and over it as many models in training and samplers as clients ask for.

On a layout every rank has a bench and executes the same commands; texts are sampled by rank 0, from a base of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luthier.adapters import beside
from luthier.engine.adopt import adopt
from luthier.engine.build import Precision, choose_precision
from luthier.engine.identity import model_digest
from luthier.engine.state import TrainState
from luthier.errors import ModelError, UserError
from luthier.hf.load import DTYPES, load_model
from luthier.hf.source import load_config, resolve
from luthier.hf.together import together
from luthier.hf.tokenizer import load_tokenizer
from luthier.tinker import saved
from luthier.tinker.adapters import apply_lora
from luthier.tinker.client import LocalTrainingClient
from luthier.tinker.server import wire
from luthier.tinker.server.pool import SamplerPool
from luthier.tinker.types import AdamParams, LoraConfig

Answer = tuple[dict[str, Any], bytes]
"""Head and payload of an answer."""


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is started with.

    Attributes:
        socket: of the server.
        tokenizer_directory: where to write the base model's tokenizer.
        model: the base model, as the command line names it.
        precision, device: as `luthier train` takes them; chosen for the machine when None.
        parallel: how models in training are laid out over the worker's processes; None for one process.
        tokens_per_microbatch: how many positions run at once.
        slots: how many texts grow side by side.
    """

    socket: Path
    tokenizer_directory: Path
    model: str
    precision: Precision | None
    device: str | None
    parallel: Mapping[str, Any] | None
    tokens_per_microbatch: int
    slots: int


class Bench:
    """Executes commands, each a method of its name; errors of its users are `UserError`s.

    Args:
        config: what the worker was started with.
        device: of this process.
        rank: of this process.
    """

    def __init__(self, config: WorkerConfig, device: torch.device, rank: int) -> None:
        self._config = config
        self._device = device
        self._rank = rank
        self._source = resolve(config.model)
        self._dtype = DTYPES[choose_precision(config.precision, device)]
        self._clients: dict[str, LocalTrainingClient] = {}
        self._tokenizer: Any
        try:
            self._tokenizer = load_tokenizer(self._source)
        except ModelError:
            self._tokenizer = None
        self.commands: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
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
        if config.parallel is None:
            _ = self.pool  # what is wrong with the model is to be known before anyone asks for it

    @cached_property
    def _base(self) -> Any:
        """The base model, whole; on a layout it is needed for sampling alone."""
        return load_model(self._source, dtype=self._dtype, device=self._device).requires_grad_(False)

    @cached_property
    def pool(self) -> SamplerPool:
        """All samplers; of rank 0."""
        return SamplerPool(self._base, self._tokenizer, slots=self._config.slots)

    @property
    def is_sampling(self) -> bool:
        """Whether a text is growing or waiting to."""
        return "pool" in vars(self) and self.pool.busy

    def describe(self) -> dict[str, Any]:
        """What the server tells clients of the base model."""
        config = load_config(self._source)
        text = config.get_text_config()
        return {
            "arch": next(iter(config.architectures or []), config.model_type),
            "context": getattr(text, "max_position_embeddings", None),
            "vocabulary": text.vocab_size,
            "weights": model_digest(self._base) if self._config.parallel is None else None,  # none is whole there
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": str(self._device),
            "tokenizer_id": self._tokenizer_id(),
        }

    def _tokenizer_id(self) -> str | None:
        """What clients load the tokenizer by: the Hub's name, or a directory; None where there is no tokenizer."""
        if self._tokenizer is None:
            return None
        if self._source.kind == "hub":
            return self._source.repo
        if self._source.kind == "directory" and self._source.path is not None:
            return str(self._source.path.resolve())
        self._tokenizer.save_pretrained(self._config.tokenizer_directory)  # it is nowhere else
        return str(self._config.tokenizer_directory.resolve())

    # --- models in training ---------------------------------------------------------------------------------------

    def _create(self, head: dict[str, Any], payload: bytes) -> Answer:
        """A model over the base: with adapters, or for one that trains whole with a copy of all weights. On a layout
        each has a base of its own, cut."""
        config = self._config
        lora = LoraConfig(**head["lora"]) if head["lora"] is not None else None
        self._clients[head["model"]] = LocalTrainingClient(
            self._config.model if config.parallel is not None else self._alone(lora, head["seed"]),
            lora if config.parallel is not None else None,
            parallel=config.parallel,
            tokens_per_microbatch=config.tokens_per_microbatch,
            precision=config.precision,
            device=config.device,
        )
        return {}, b""

    def _alone(self, lora: LoraConfig | None, seed: int) -> TrainState:
        if lora is None:
            model, report = load_model(self._source, dtype=self._dtype, device=self._device), None
        else:
            model = beside(self._base)
            report = apply_lora(model, lora)
        state = adopt(model, lora=report, source=self._source, seed=seed)
        state.tokenizer = self._tokenizer
        return state

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
            with together(dist.group.WORLD if dist.is_initialized() else None):
                if self._rank == 0:
                    shutil.rmtree(directory, ignore_errors=True)  # of a server that was killed before it knew
            saved.save_for_sampler(client.state, directory)
            size = _size(directory)
        if head["live"] and self._config.parallel is not None:
            what = "weights in training lie on several ranks"
            raise ModelError(what, where="kind", remedy="use snapshot")
        if head["live"]:
            self.pool.add(head["sampler"], client.model)
        elif head["sampler"] is not None:  # as after a restart: a fused layer's adapters change form in files
            self._read_sampler(head["sampler"], Path(head["directory"]))
        return {"bytes": size}, b""

    def _load_sampler(self, head: dict[str, Any], payload: bytes) -> Answer:
        if head["model"] is not None:
            self.pool.add(head["sampler"], self._clients[head["model"]].model)
        else:
            self._read_sampler(head["sampler"], Path(head["directory"]))
        return {}, b""

    def _read_sampler(self, name: str, directory: Path) -> None:
        if self._rank == 0:
            self.pool.add(name, saved.load_for_sampler(self._base, directory))

    def _drop_sampler(self, head: dict[str, Any], payload: bytes) -> Answer:
        if self._rank == 0:
            self.pool.remove(head["sampler"])
        return {}, b""


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
