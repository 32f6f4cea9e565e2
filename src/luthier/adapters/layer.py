"""Adapters in place: the linear layer itself changes its class and gains two small children, `lora_A` and `lora_B`.

The base weight keeps its module and its name, so no key of a checkpoint moves, whoever reads or writes it; detaching
removes the children and puts the class back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luthier.adapters.dora import Magnitude, dropped, rescaled
from luthier.adapters.products import low_rank_products
from luthier.adapters.rows import SUFFIX as ROWS
from luthier.adapters.siblings import Siblings
from luthier.hf.linear import LinearShape, linear_shape
from luthier.hf.nf4 import Nf4Weight

_PLAIN = (nn.Parameter, Tensor)
"""A parameter, or this rank's part of one while a forward runs."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """How one layer is adapted.

    Attributes:
        rank: length of the small side of A and B.
        alpha: numerator of the scale.
        dropout: share of the adapter's input that is dropped while training.
        rslora: divide alpha by the square root of the rank instead of the rank.
        dora: a length for each output beside the two matrices (`dora`).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdapterMatrix(nn.Module):
    """One of the two matrices of an adapter: `weight` [outputs, inputs], no bias.

    It is no `nn.Linear`, so whatever walks a model's linear layers (targets, quantisation, initialisation) passes by.

    Attributes:
        mask: 0 where an entry is held at 0, else 1, in the weight's shape; None where none is. It is in no checkpoint.
    """

    weight: nn.Parameter
    mask: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.register_buffer("mask", None, persistent=False)

    @property
    def effective(self) -> Tensor:
        """The weight that counts: entries that the mask holds at 0 are 0, and get no gradient."""
        return self.weight if self.mask is None else self.weight * self.mask

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return F.linear(x, self.effective)

    def extra_repr(self) -> str:
        return "{1}, {0}".format(*self.weight.shape)


class LoraLayer(nn.Module):
    """What a linear layer becomes in addition to itself; always the first base of a class that `attach` makes.

    Attributes:
        lora_A: `weight` [rank, inputs].
        lora_B: `weight` [outputs, rank].
        lora_magnitude_vector: `weight` [outputs]; of DoRA alone.
        lora_spec: rank, alpha, dropout.
        lora_shape: the sizes of the base.
        lora_siblings: the group of layers that may share this one's input, None where nothing is shared.
        lora_first: A and B as they began, where they were taken out of the base weight (`principal`); else None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: AdapterMatrix
    lora_B: AdapterMatrix
    lora_magnitude_vector: Magnitude
    lora_spec: LoraSpec
    lora_shape: LinearShape
    lora_siblings: Siblings | None
    lora_first: tuple[Tensor, Tensor] | None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs], the base's output plus the scaled low-rank product."""
        if not self._fusable(x):
            return self._plain_forward(x)
        dropout = self.lora_spec.dropout if self.training else 0.0
        if dropout and self.lora_spec.dora:
            return self._plain_forward(x)
        if dropout == 0.0 and self.lora_siblings is not None and torch.is_grad_enabled():
            return self.lora_siblings.output(self, x)
        z = F.dropout(x, dropout) if dropout else None
        return self.fused(x, z, [self])[0]

    def fused(self, x: Tensor, z: Tensor | None, layers: list[LoraLayer]) -> tuple[Tensor, ...]:
        """The outputs of layers of one input, scale and dtype (`products.low_rank_products`)."""
        tensors: list[tuple[Tensor, Tensor | None, Tensor, Tensor]]
        tensors = [(layer.weight, layer.bias, layer.lora_A.weight, layer.lora_B.effective) for layer in layers]
        outputs = low_rank_products(x, z, self.lora_spec.scale, self.lora_shape.transposed, tensors)
        if not self.lora_spec.dora:
            return outputs
        return tuple(rescaled(layer, y) for layer, y in zip(layers, outputs, strict=True))

    def _fusable(self, x: Tensor) -> bool:
        """Plain tensors and a plain base; compilers, autocast and sharded tensors get plain operations instead."""
        return (
            self.lora_shape.plain
            and not torch.compiler.is_compiling()
            and type(x) is Tensor
            and type(self.weight) in (*_PLAIN, Nf4Weight)
            and type(self.lora_A.weight) in _PLAIN
            and x.dtype == self.weight.dtype
            and x.is_contiguous()
            and (x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type))  # meta has no autocast to ask
        )

    def _plain_forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, super().forward(x))  # the base's own, next in the order of classes
        z = x.to(self.lora_A.weight.dtype)
        if self.lora_spec.dropout:
            z = F.dropout(z, self.lora_spec.dropout, self.training)
        low = self.lora_B(self.lora_A(z)) * self.lora_spec.scale
        if not self.lora_spec.dora:
            return (y + low).to(y.dtype)
        if not (self.lora_spec.dropout and self.training):
            return rescaled(self, (y + low).to(y.dtype))
        base = cast(Tensor, super().forward(z.to(x.dtype)))
        return dropped(self, y, base if self.bias is None else base - self.bias, low)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_spec.rank}, scale={self.lora_spec.scale:g}".removeprefix(", ")


_CLASSES: dict[type, type[nn.Module]] = {}
"""Class of the base -> class of the adapted layer."""


def _adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Lora{base.__name__}", (LoraLayer, base), {"__module__": __name__})
    return _CLASSES[base]


def attach(module: nn.Module, spec: LoraSpec, dtype: torch.dtype | None = None) -> LoraLayer:
    """Adapt a linear layer in place; the matrices are left uninitialised (`init.initialise_adapters`).

    Args:
        module: an `nn.Linear` or a `Conv1D`, on meta or real, not adapted yet.
        spec: rank, alpha, dropout.
        dtype: of the two matrices; the base weight's when left out.

    Returns:
        the same object.

    Raises:
        TypeError: the module is no linear layer, or is adapted already.
    """
    shape = linear_shape(module)
    if shape is None or isinstance(module, LoraLayer):
        raise TypeError(f"{type(module).__name__} cannot be adapted")
    weight = cast(Tensor, module.weight)
    where: dict[str, Any] = {"device": weight.device, "dtype": dtype or weight.dtype}
    down = AdapterMatrix(shape.inputs, spec.rank, **where)
    up = AdapterMatrix(spec.rank, shape.outputs, **where)
    module.__class__ = _adapted_class(type(module))
    layer = cast(LoraLayer, module)
    layer.lora_A, layer.lora_B = down, up
    if spec.dora:
        layer.lora_magnitude_vector = Magnitude(shape.outputs, device=weight.device, dtype=weight.dtype)
    layer.lora_spec, layer.lora_shape, layer.lora_siblings, layer.lora_first = spec, shape, None, None
    layer.train(layer.training)
    return layer


def split_outputs(layer: LoraLayer, parts: Tensor) -> None:
    """Let a layer that makes several things at once have an adapter for each: B is 0 between one's part of A and
    another's outputs.

    Args:
        layer: adapted, of rank parts x r, weights in place; the k-th r rows of A are those of part k.
        parts: int64 [outputs], which part each output is of.
    """
    up = layer.lora_B.weight
    count = int(parts.max()) + 1
    owner = torch.arange(count).repeat_interleave(up.shape[1] // count)
    layer.lora_B.mask = (parts[:, None] == owner).to(up)


def detach(layer: LoraLayer) -> nn.Module:
    """Remove the adapter and put the class back; the base weight is left as it is.

    Returns:
        the same object.
    """
    if layer.lora_siblings is not None:
        layer.lora_siblings.part()
    if layer.lora_spec.dora:
        del layer.lora_magnitude_vector
    for name in ("lora_A", "lora_B", "lora_spec", "lora_shape", "lora_siblings", "lora_first"):
        delattr(layer, name)
    base = type(layer).__mro__[2]
    layer.__class__ = base
    return layer


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Full name and layer of everything that is adapted, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter's full name is that of an adapter's matrix or lengths, of rows of single tokens, or of what
    learns in the place of text."""
    return name.endswith(_OURS) or name.startswith("prompt_encoder.")


_OURS = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_magnitude_vector.weight",
    ROWS,
    ".virtual_tokens.prompt",
    ".attention_prefix.keys",
    ".attention_prefix.values",
    ".adaption.prompt",
    ".adaption.gate",
)
