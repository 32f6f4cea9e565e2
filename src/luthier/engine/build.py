"""THE one order in which a model is made ready to train.

meta build -> adapters in place -> weights streamed in -> ties settled, adapters initialised, the rest frozen -> fast
modules, each checked against its own forward -> packing proved -> activation checkpointing -> compile -> head ->
optimizer
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch

from luthier.adapters import LoraReport, apply_lora, finish_lora, is_adapter_weight
from luthier.config import LoraConfig, OptimizerConfig
from luthier.engine.logprobs import Head
from luthier.engine.state import TrainState
from luthier.errors import ConfigError
from luthier.hf.allocator import bound_kernel_cache, tune_allocator
from luthier.hf.anatomy import describe
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.forward import packing_is_exact
from luthier.hf.limits import limits_of
from luthier.hf.load import DTYPES, load_model
from luthier.hf.source import ModelSource
from luthier.optim.build import build_optimizer
from luthier.parallel.checkpointing import Policy, checkpoint_activations

logger = logging.getLogger(__name__)

_CPU_ROWS = 64
"""Packed rows have another length in every step. On the CPU each new length costs compilations in oneDNN, and blocks of
memory of yet another size; a few positions of padding cost less."""
Precision = Literal["fp32", "bf16", "fp64"]


def choose_device(name: str | None) -> torch.device:
    """The device asked for, else CUDA where there is one, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] == "mps":
        what = "mps has no float64, in which weights of the loss and norms are summed"
        raise ConfigError(what, where="train.device", remedy="leave it out for the CPU")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{name} cannot be used here ({str(error).splitlines()[0]})", where="train.device", remedy="leave it out"
        ) from None
    return device


def choose_precision(asked: Precision | None, device: torch.device) -> Precision:
    """The precision asked for, else bf16 where the device multiplies bf16 matrices in hardware, else fp32.

    Raises:
        ConfigError: there is no such precision.
    """
    if asked is not None:
        if asked not in DTYPES:
            raise ConfigError(f"{asked} is not offered", where="precision", remedy=f"use {' or '.join(DTYPES)}")
        return asked
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if fast else "fp32"
    return "fp32"


def build_model(
    source: ModelSource,
    *,
    adapter: LoraConfig | None,
    precision: Precision | None,
    device: torch.device,
    attention: str | None = None,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> tuple[Any, LoraReport | None]:
    """A model with its weights and, where asked for, adapters in place; only what trains requires gradients.

    Args:
        source: where the weights are.
        adapter: LoRA beside frozen weights; None trains everything.
        precision: dtype of weights and arithmetic; what the device is fast at when left out.
        device: where the model goes.
        attention: attention implementation; chosen for the device when left out.
        from_scratch: the model's own random initialisation instead of the weights.
        trust_remote_code: run code that the model's repository brings.
        seed: of the random initialisation, of the adapters and of the model.
    """

    bound_kernel_cache()

    def prepare(model: Any) -> None:
        if adapter is not None:
            apply_lora(model, adapter, seed)

    model = load_model(
        source,
        dtype=DTYPES[choose_precision(precision, device)],
        device=device,
        attention=attention,
        prepare=prepare,
        from_scratch=from_scratch,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    report = finish_lora(model, adapter, seed) if adapter is not None else None
    if device.type == "cpu":
        for line in accelerate_model(model):
            logger.debug("%s", line)
    return model, report


def build_state(
    source: ModelSource,
    *,
    adapter: LoraConfig | None,
    optimizer: OptimizerConfig,
    precision: Precision | None = None,
    device: torch.device | None = None,
    attention: str | None = None,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    activation_checkpointing: Policy = "off",
    compile_layers: bool = False,
) -> TrainState:
    """A model and its optimizer, ready for the first step. Arguments as of `build_model` and of the YAML."""
    device = device or choose_device(None)
    model, report = build_model(
        source,
        adapter=adapter,
        precision=precision,
        device=device,
        attention=attention,
        from_scratch=from_scratch,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    anatomy = describe(model)
    _, packing_fault = packing_is_exact(model)
    checkpoint_activations(model, activation_checkpointing)
    if compile_layers:
        for name in anatomy.layers:
            model.get_submodule(name).compile()
    model.train()
    if device.type == "cpu":
        tune_allocator()  # after loading, so that what loading freed has gone back to the system
    inside = tuple(f"{layer}." for layer in anatomy.layers)
    return TrainState(
        model=model,
        optimizer=build_optimizer(
            model.named_parameters(),
            optimizer,
            adapters=is_adapter_weight,
            hidden_matrices=lambda name: name.startswith(inside),
            seed=seed,
        ),
        head=Head(model),
        device=device,
        source=source,
        lora=report,
        row_multiple=_CPU_ROWS if device.type == "cpu" and model.dtype != torch.float64 and not packing_fault else 1,
        packing_fault=packing_fault,
        limits=limits_of(model),
    )
