"""What every recipe does first: the process made ready, the tokenizer, the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from luthier.adapters import adapter_of_files
from luthier.adapters.learned_files import kind_of_files
from luthier.adapters.peft_config import read_peft_config
from luthier.adapters.rows import NewTokens, add_tokens, merge_rows
from luthier.batch import Batch
from luthier.config import LoraConfig, RunConfig
from luthier.data.loader import Rows, StreamRows, build_rows, iterate_once
from luthier.engine.build import build_network, build_state, choose_device
from luthier.engine.identity import model_digest
from luthier.engine.network import Network
from luthier.engine.pictures import picture_fault
from luthier.engine.randomness import seed_everything
from luthier.engine.state import TrainState
from luthier.errors import ConfigError, ModelError
from luthier.hf.source import ModelSource, resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.hf.vision.processor import open_eyes
from luthier.launch import FIRST_STEP_TIMEOUT, set_timeout
from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh
from luthier.parallel.rules import check_pictures
from luthier.report.progress import TERMINAL, stage


def prepare_process(config: RunConfig) -> torch.device:
    """Threads, seeds, device."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    seed_everything(config.seed)
    return choose_device(config.train.device)


def model_source(config: RunConfig) -> ModelSource:
    return resolve(config.model, revision=config.revision)


def tokenizer_of(config: RunConfig, adapter: Path | None = None) -> Any:
    """The tokenizer of a run, with the chat template and the new tokens that its config names.

    Args:
        config: of the run.
        adapter: a directory of PEFT files; if these have rows of single tokens, their tokenizer knows which.
    """
    if adapter is None and isinstance(config.adapter, LoraConfig) and config.adapter.start_from is not None:
        adapter = Path(config.adapter.start_from)
    if config.tokenizer is None and adapter is not None and (adapter / "tokenizer_config.json").is_file():
        with suppress(ModelError):  # whoever reads the weights says what is wrong with these files
            if kind_of_files(adapter) == "lora" and read_peft_config(adapter).tokens:
                config = config.model_copy(update={"tokenizer": str(adapter)})
    return _tokenizers(config)[0]


def _tokenizers(config: RunConfig) -> tuple[Any, NewTokens | None]:
    source, trust = model_source(config), config.trust_remote_code
    template = config.data.chat_template
    tokenizer = load_tokenizer(source, tokenizer=config.tokenizer, chat_template=template, trust_remote_code=trust)
    open_eyes(source, tokenizer, trust_remote_code=trust)
    named = config.adapter.new_tokens if isinstance(config.adapter, LoraConfig) else []
    return tokenizer, add_tokens(tokenizer, named) if named else None


def new_tokens_of(config: RunConfig) -> NewTokens | None:
    """What the tokenizer makes of `adapter.new_tokens`; None where there are none."""
    asked = isinstance(config.adapter, LoraConfig) and config.adapter.new_tokens
    return _tokenizers(config)[1] if asked else None


def require_same_tokens(name: str, source: ModelSource, config: RunConfig, where: str) -> None:
    """Refuse a second model whose tokens mean something else, before its weights are read.

    Args:
        name: of the second model.
        source: where it is.
        config: of the run.
        where: what names it.

    Raises:
        ConfigError: names the first token that differs.
    """
    own = tokenizer_of(config).get_vocab()
    others = load_tokenizer(source, trust_remote_code=config.trust_remote_code).get_vocab()
    if own == others:
        return
    differing = sorted((own.get(token, others.get(token, 0)), token) for token in own.keys() | others.keys())
    token = next(token for _, token in differing if own.get(token) != others.get(token))
    told = [
        f"has {token!r} at {place}" if place is not None else f"has no {token!r}"
        for place in (others.get(token), own.get(token))
    ]
    raise ConfigError(
        f"the vocabulary of {name} is another: it {told[0]}, and the model {told[1]}",
        where=where,
        remedy="take a model of the same tokenizer",
    )


def rows_of(config: RunConfig, tokenizer: Any) -> tuple[Rows | StreamRows, Rows | None]:
    """Training rows and, where the config names any, validation rows.

    Raises:
        ConfigError: there are no training rows.
        DataError: a source or a row cannot be used.
    """
    with stage("tokenising") as told:
        rows = build_rows(config.data, "train", tokenizer, seed=config.seed, progress=told)
    held_out: Rows | None = None
    if config.data.validation or config.data.validation_fraction:
        with stage("tokenising validation rows") as told:
            found = build_rows(config.data, "validation", tokenizer, seed=config.seed, progress=told)
        assert isinstance(found, Rows)
        held_out = found.first(config.evaluation.rows) if config.evaluation.rows is not None else found
    return rows, held_out


@contextmanager
def meshed(config: RunConfig, device: torch.device, *, any_number: bool = False) -> Iterator[Mesh | None]:
    """The groups of a run that was started on several ranks, within `launch.join`; None in one process.

    Args:
        config: names the layout.
        device: of this rank.
        any_number: one process will do, whatever layout the config was trained on.

    Raises:
        ConfigError: the layout takes another number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 and any_number:
        yield None
        return
    layout = Layout.resolve(config.parallel, ranks)
    if ranks == 1:
        yield None
        return
    if dist.get_rank() > 0:
        TERMINAL.mute()
    mesh = Mesh(layout, device)
    set_timeout(FIRST_STEP_TIMEOUT)  # torch gives new groups its own default
    yield mesh


def state_of(config: RunConfig, device: torch.device, mesh: Mesh | None = None) -> TrainState:
    """The model and its optimizer."""
    return build_state(
        model_source(config),
        adapter=config.adapter,
        optimizer=config.optimizer,
        precision=config.train.precision,
        device=device,
        attention=config.train.attention,
        from_scratch=config.from_scratch,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
        tokens=new_tokens_of(config),
        activation_checkpointing=config.train.activation_checkpointing,
        compile_layers=config.train.compile,
        mesh=mesh,
        parallel=config.parallel,
        moe=config.moe,
        score=config.method.name == "reward",
    )


def inference_network(
    config: RunConfig, device: torch.device, adapter: Path | None, mesh: Mesh | None = None
) -> Network:
    """A config's model without what its training would add, or with the adapters of a directory of PEFT files, of the
    config's dtype and beside a base that is quantised as it says."""
    found = adapter_of_files(adapter) if adapter is not None else None
    if found is not None and config.adapter is not None:
        found = found.model_copy(update={"dtype": config.adapter.dtype})
    if isinstance(found, LoraConfig) and isinstance(config.adapter, LoraConfig):
        found = found.model_copy(update=config.adapter.model_dump(include={"quantize", "double_quantize"}))
    network = build_network(
        model_source(config),
        adapter=found,
        precision=config.train.precision,
        device=device,
        attention=config.train.attention,
        from_scratch=config.from_scratch,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
        mesh=mesh,
        parallel=config.parallel,
    )
    if mesh is None:
        merge_rows(network.model)  # nothing trains, so the table may grow
    network.model.eval()
    return network


def held_out_batches(network: Network, rows: Rows, config: RunConfig) -> Iterator[Batch]:
    """Microbatches that hold every row once; on a layout those of this data rank."""
    mesh = network.mesh
    return iterate_once(
        rows,
        config.data.sequence_length,
        rank=mesh.data_rank if mesh is not None else 0,
        world_size=mesh.data_ranks if mesh is not None else 1,
        packing=config.data.packing and not unpackable(network, rows),
    )


def require_pictures_fit(config: RunConfig, mesh: Mesh | None) -> None:
    """Refuse what rows with images cannot be trained with, before weights are read.

    Raises:
        ConfigError: a layout that cuts rows or layers, or an adapter that lengthens rows; it is named.
    """
    if mesh is not None:
        check_pictures(mesh.layout)
    if config.adapter is not None and not isinstance(config.adapter, LoraConfig):
        what = f"adapter {config.adapter.kind} moves tokens from where rows have their images"
        raise ConfigError(what, where="adapter.kind", remedy="use lora, or leave the adapter out")


def unpackable(network: Network, rows: Rows | StreamRows) -> str:
    """Why rows cannot stand in one microbatch, as a clause; empty where they can."""
    if not rows.pictures or rows.sight is None or network.packing_fault:
        return network.packing_fault
    if network.picture_fault is None:
        network.picture_fault = picture_fault(network, rows.sight)
    return network.picture_fault


def identity(config: RunConfig, state: TrainState) -> dict[str, Any]:
    """What a checkpoint must have been taken of for this run to go on with it; the loader checks data and batch."""
    adapter = config.adapter.model_dump(mode="json") if config.adapter is not None else {}
    kind = config.adapter.kind if config.adapter is not None else "none"
    group = dist.group.WORLD if state.mesh is not None else None
    return {
        "model": model_digest(state.model, group),  # not its name: directories are moved
        "adapter": {"none": "none", "lora": "LoRA"}.get(kind, kind),
        **{f"adapter.{key}": value for key, value in adapter.items()},
        "method": config.method.name,
        **{f"method.{key}": value for key, value in config.method.deciding().items()},
        "optimizer.name": config.optimizer.name,
        "train.precision": str(state.outline.dtype).removeprefix("torch."),
        "seed": config.seed,
    }
