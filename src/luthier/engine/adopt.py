"""A model that somebody else has loaded, made ready for the training step as `build` makes its own."""

from __future__ import annotations

from typing import Any

import torch

from luthier.adapters import LoraReport, is_adapter_weight
from luthier.config.sections import AdamWConfig, OptimizerConfig
from luthier.engine.build import CPU_ROWS
from luthier.engine.logprobs import Head
from luthier.engine.state import TrainState
from luthier.hf.allocator import bound_kernel_cache, tune_allocator
from luthier.hf.anatomy import describe
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.forward import packing_is_exact
from luthier.hf.limits import limits_of
from luthier.hf.rows.attention import parts_attention, register_attention, takes_attention
from luthier.hf.rows.rotary import follow_documents
from luthier.hf.source import ModelSource
from luthier.optim.build import build_optimizer


def adopt(
    model: Any,
    *,
    lora: LoraReport | None = None,
    optimizer: OptimizerConfig | None = None,
    source: ModelSource | None = None,
    seed: int = 0,
) -> TrainState:
    """Make a loaded model ready to train in this process. It is changed in place: its attention becomes the one that
    keeps documents apart, and some of its modules faster ones of the same numbers.

    Args:
        model: a causal language model of Transformers, adapters in place or not; what requires gradients trains. It is
            left in the mode that it is in, so dropout of its own acts where that is training.
        lora: what was adapted, None where it trains whole.
        optimizer: AdamW when left out.
        source: where the weights came from; as the model says when left out.
        seed: of stochastic rounding.

    Raises:
        UserError: no parameter trains.
    """
    bound_kernel_cache()
    if takes_attention(type(model)):
        model.set_attn_implementation(parts_attention(model.config, register_attention()))
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped matrix products refuse float64
    follow_documents(model)
    device = model.device
    if device.type == "cpu":
        accelerate_model(model)
        tune_allocator(keep=True)
    _, packing_fault = packing_is_exact(model)
    layers = tuple(f"{layer}." for layer in describe(model).layers)
    name = model.config._name_or_path or type(model).__name__
    padded = device.type == "cpu" and model.dtype != torch.float64 and not packing_fault
    tied = set(model.all_tied_weights_keys)
    return TrainState(
        model=model,
        head=Head(model),
        device=device,
        source=source or ModelSource("directory", name, name=name),
        lora=lora,
        row_multiple=CPU_ROWS if padded else 1,
        packing_fault=packing_fault,
        limits=limits_of(model),
        parameters=sum(p.numel() for key, p in model.named_parameters() if key not in tied),
        optimizer=build_optimizer(
            model.named_parameters(),
            optimizer or AdamWConfig(),
            adapters=is_adapter_weight,
            hidden_matrices=lambda key: key.startswith(layers),
            seed=seed,
        ),
    )
