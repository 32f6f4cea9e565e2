"""QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): what of a frozen base is kept in NF4, and the line
that says so.

Quantised are the linear layers of the decoder layers. Embedding, head, norms, routers and what is trained whole stay as
they are, and so do experts whose matrices lie in one tensor; of these the line says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from luthier.adapters.loftq import LoftQ, rounds_of
from luthier.adapters.structure import wholly_trained
from luthier.config import LoraConfig
from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.experts import find_experts
from luthier.hf.nf4 import expected_bytes, kernels
from luthier.hf.packing import Packing, cut_blocks, is_transposed


@dataclass(frozen=True, slots=True)
class QuantizedReport:
    """What was quantised; `str()` is the line that a run prints.

    Attributes:
        layers: how many linear layers.
        share: their bytes, over what they take in bf16.
        base: the same of the whole base, adapters left out.
        experts: modules of fused experts, which are not quantised.
    """

    layers: int
    share: float
    base: float
    experts: int

    def __str__(self) -> str:
        line = f"NF4: {self.layers} layers, {self.share:.2f}x of bf16; whole base {self.base:.2f}x"
        return f"{line}; {self.experts} modules of fused experts are not quantised" if self.experts else line


def packing_of(config: LoraConfig | None) -> Packing | None:
    """How a config's base is quantised, None where it is not.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if config is None or config.quantize is None:
        return None
    kernels()
    if rounds := rounds_of(config.init):
        return LoftQ(config.double_quantize, rounds=rounds)
    return Packing(config.double_quantize)


def quantizable(model: Any) -> list[str]:
    """Full names of the weights that are quantised, in the model's order.

    Args:
        model: a Transformers model, on meta or real, adapters in place.

    Raises:
        ConfigError: there is nothing to quantise.
    """
    inside = tuple(f"{name}." for name in wholly_trained(model))
    layers = set(describe(model).all_linear)
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if name in layers and not f"{name}.".startswith(inside) and module.weight.dim() == 2
    ]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers that could be quantised", where="adapter.quantize"
        )
    return names


def require_whole_blocks(model: nn.Module, packing: Packing) -> None:
    """Refuse a layout that would cut blocks of 64 numbers, before any weight is read.

    Args:
        model: on meta, laid out.
        packing: names of the weights that will be quantised, those that are not here left out.

    Raises:
        ConfigError: a weight is named, and what would work.
    """
    for name in packing.names:
        parameter = model.get_parameter(name)
        transposed = is_transposed(model.get_submodule(name.rpartition(".")[0]))
        if (why := cut_blocks(parameter, transposed=transposed)) is not None:
            raise ConfigError(
                f"{name} cannot be quantised on this layout: {why}",
                where="adapter.quantize",
                remedy="use fewer ranks of tp or dp_shard, or pp, which cuts no weights",
            )


def quantized_report(model: Any, names: Sequence[str], double: bool) -> QuantizedReport:
    """Count bytes of a whole model, on meta or real.

    Args:
        model: adapters in place.
        names: of the weights that are quantised, or will be.
        double: whether their scales are.
    """
    anatomy = describe(model)
    tied = f"{anatomy.head}.weight" if anatomy.tied else None
    packed, of_bf16, base, base_bf16 = 0, 0, 0, 0
    chosen = set(names)
    owners = {name.rpartition(".")[0] for name in names}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or name == tied:
            continue
        size = expected_bytes(parameter.numel(), double) if name in chosen else parameter.nbytes
        base, base_bf16 = base + size, base_bf16 + 2 * parameter.numel()
        if name.rpartition(".")[0] in owners:
            packed, of_bf16 = packed + size, of_bf16 + 2 * parameter.numel()
    return QuantizedReport(len(names), packed / of_bf16, base / base_bf16, len(find_experts(model)))
