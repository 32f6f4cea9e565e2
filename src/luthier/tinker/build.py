"""What a client is given, made into a state that the training step takes: in this process, or laid out over many."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from luthier.adapters import adapted, initialise_adapters
from luthier.config import LoraConfig as Adapter
from luthier.config import ParallelConfig
from luthier.config.sections import AdamWConfig
from luthier.engine.adopt import adopt
from luthier.engine.build import Precision, build_state, choose_device, choose_precision
from luthier.engine.state import TrainState
from luthier.errors import ConfigError, ModelError
from luthier.hf.fused import fused_projections
from luthier.hf.load import DTYPES, load_model
from luthier.hf.source import ModelSource, resolve
from luthier.launch import place
from luthier.launch.world import own_device
from luthier.optim.build import decays
from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh
from luthier.tinker.adapters import apply_lora, is_merged, report_of, roles_of
from luthier.tinker.types import LoraConfig


def build(
    model: Any,
    lora: LoraConfig | None,
    *,
    parallel: ParallelConfig | Mapping[str, Any] | None,
    precision: Precision | None,
    device: str | None,
    seed: int,
) -> TrainState:
    """A state, its optimizer one that `optim_step` can give other numbers at every step.

    Args:
        model, lora, parallel, precision, device, seed: as of `LocalTrainingClient`.

    Raises:
        UserError: the model cannot be used or laid out so, or nothing of it trains.
    """
    if isinstance(model, TrainState):
        state = model
    elif parallel is not None and (layout := Layout.resolve(_read(parallel), _ranks())).ranks > 1:
        state = _laid_out(model, lora, _read(parallel), layout, precision, device, seed)
    else:
        source = resolve(model) if isinstance(model, str) else None
        if source is not None:
            where = choose_device(device)
            model = load_model(source, dtype=DTYPES[choose_precision(precision, where)], device=where, seed=seed)
        if lora is not None:
            apply_lora(model, lora)
        refuse_merged(model)
        state = adopt(model, lora=report_of(model), source=source, seed=seed)
    if state.in_backward is not None:
        what = "each call of forward_backward would take a step of its own"
        raise ConfigError(what, where="optimizer.in_backward", remedy="build the state without it")
    if any(getattr(layer, "lora_first", None) is not None for _, layer in adapted(state.model)):
        what = "adapters that began as a part of the base (pissa, olora) stand beside another base than the model's"
        raise ConfigError(what, where="adapter.init", remedy="leave it out, or train by luthier train")
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    for group in state.optimizer.param_groups:
        if group["rule"] != "adamw":
            what = f"its optimizer is {group['rule']}, and optim_step takes the numbers of Adam"
            raise ConfigError(what, where="optimizer.name", remedy="build the state with adamw")
        group["decays"] = bool(group["params"]) and decays(names[group["params"][0]], group["params"][0])
    return state


def refuse_merged(model: Any) -> None:
    """Raise where nothing is left to train.

    Raises:
        ModelError: the model's adapters were folded in.
    """
    if is_merged(model):
        what = "its adapters were merged into its weights, so nothing is left to train"
        raise ModelError(what, where="model", remedy="train first and merge last, or apply_lora again")


def _read(parallel: ParallelConfig | Mapping[str, Any]) -> ParallelConfig:
    if isinstance(parallel, ParallelConfig):
        return parallel
    try:
        return ParallelConfig(**parallel)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["parallel", *map(str, first["loc"])])
        raise ConfigError(first["msg"], where=where, remedy="give degrees, {'tp': 2}") from None


def _laid_out(
    model: Any,
    lora: LoraConfig | None,
    parallel: ParallelConfig,
    layout: Layout,
    precision: Precision | None,
    device: str | None,
    seed: int,
) -> TrainState:
    """All ranks; the adapters are those of one process, initial values included."""
    if not isinstance(model, str):
        what = "a model that is loaded already is whole in every process"
        raise ConfigError(what, where="parallel", remedy="name the model, or give a TrainState of engine.build")
    where, here = choose_device(device), place(os.environ)
    if here is not None:
        where = own_device(where, here)
    source = resolve(model)
    state = build_state(
        source,
        adapter=None if lora is None else Adapter(rank=lora.rank, alpha=lora.alpha, target=roles_of(lora)),
        optimizer=AdamWConfig(),
        precision=precision,
        device=where,
        seed=seed,
        mesh=Mesh(layout, where),
        parallel=parallel,
    )
    state.model.eval()  # as a model that is loaded is left: dropout of its own acts where a caller wants it
    if lora is not None:
        _refuse_fused(source, state)
        initialise_adapters(state.model, lora.seed or 0)
    return state


def _ranks() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    here = place(os.environ)
    if here is not None and here.ranks > 1:
        what = f"this is one of {here.ranks} processes that do not know each other yet"
        remedy = "call torch.distributed.init_process_group() first"
        raise ConfigError(what, where="parallel", remedy=remedy)
    return 1


def _refuse_fused(source: ModelSource, state: TrainState) -> None:
    fused = fused_projections(state.outline).keys() & {name for name, _ in adapted(state.outline)}
    if fused:
        what = f"{source.name} makes queries, keys and values by one matrix, whose three adapters are not laid out"
        raise ConfigError(what, where="lora.train_attn", remedy="set it to false, or train in one process")
