"""Adapters on fused experts: each matrix of each expert gets a low-rank product of its own.

The module of experts changes its class in place, as a linear layer does, and its forward computes the products beside
the base: PEFT adds them to all experts' weights before every forward, which keeps a second copy of every weight until
the backward pass and computes the whole gradient of it. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luthier.adapters.embedding import LoraEmbedding
from luthier.adapters.layer import LoraLayer, LoraSpec
from luthier.hf.experts import Experts


@dataclass(frozen=True, slots=True)
class StackShape:
    """The sizes of one matrix of every expert, y = x W^T.

    Attributes:
        inputs: length of x.
        outputs: length of y.
        transposed: the matrices lie as [inputs, outputs] instead of [outputs, inputs].
        experts: how many there are.
    """

    inputs: int
    outputs: int
    transposed: bool
    experts: int


class AdapterStack(nn.Module):
    """One of the two matrices of an adapter, for every expert: `weight` [experts, outputs, inputs]."""

    weight: nn.Parameter

    def __init__(self, experts: int, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        return "{}, {}, {}".format(*self.weight.shape)


class ExpertsAdapter(nn.Module):
    """The adapter of one matrix of all experts of a module; it holds weights, and `LoraExperts` computes.

    Attributes:
        lora_A: `weight` [experts, rank, inputs].
        lora_B: `weight` [experts, outputs, rank].
        lora_spec: rank, alpha, dropout.
        lora_shape: sizes of the base.
    """

    def __init__(self, shape: StackShape, spec: LoraSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.lora_A = AdapterStack(shape.experts, shape.inputs, spec.rank, **where)
        self.lora_B = AdapterStack(shape.experts, spec.rank, shape.outputs, **where)
        self.lora_spec, self.lora_shape = spec, shape


class LoraExperts(nn.Module):
    """What a module of experts becomes in addition to itself; always the first base of a class that `attach` makes.

    Attributes:
        lora: name of a weight -> its adapter.
    """

    lora: nn.ModuleDict

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What chosen experts make of tokens, adapters included.

        Args:
            hidden_states: [T, hidden].
            top_k_index: int64 [T, k], each token's experts.
            top_k_weights: [T, k], by which their answers are summed.

        Returns:
            [T, hidden].
        """
        base = cast(Any, self)
        tokens, chosen = top_k_index.shape
        # Pairs of a token and an expert in the order in which the base's own code takes them, so that an adapter that
        # is still zero leaves every bit as it was; that code sorts without care for the order of equals.
        eager = base.config._experts_implementation == "eager"
        index = top_k_index.t().reshape(-1) if eager else top_k_index.reshape(-1)
        weights = top_k_weights.t().reshape(-1) if eager else top_k_weights.reshape(-1)
        index, order = index.sort(stable=eager)
        token = order % tokens if eager else order // chosen
        up = "gate_up_proj" if base.has_gate else "up_proj"
        sizes = torch.bincount(index, minlength=getattr(base, up).shape[0])
        x = self._product(up, hidden_states[token], index, sizes)
        x = base._apply_gate(x) if base.has_gate else base.act_fn(x)
        x = self._product("down_proj", x, index, sizes)
        if base.has_post_expert_norm:
            x = base.post_expert_norm(x)
        x = x * weights[order].unsqueeze(-1)
        if eager:
            return torch.zeros_like(hidden_states).index_add(0, token, x.to(hidden_states.dtype))
        slots = torch.empty_like(x).index_copy(0, order, x)
        return slots.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
        """Rows sorted by expert times the expert's matrix: [n, inputs] -> [n, outputs], bias and adapter included."""
        base = cast(Any, self)
        weight: Tensor = getattr(base, name)
        y = grouped(x, weight if base.is_transposed else weight.transpose(1, 2), sizes)
        if base.has_bias:
            y = y + getattr(base, f"{name}_bias")[index]
        if name not in self.lora:
            return y
        adapter = cast(ExpertsAdapter, self.lora[name])
        down, up = adapter.lora_A.weight, adapter.lora_B.weight
        z = F.dropout(x.to(down.dtype), adapter.lora_spec.dropout, self.training)
        low = grouped(grouped(z, down.transpose(1, 2), sizes), up.transpose(1, 2), sizes)
        return (y + low * adapter.lora_spec.scale).to(y.dtype)


def grouped(x: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Rows sorted by group, each times the matrix of its group.

    Args:
        x: [n, inputs].
        weights: [groups, inputs, outputs].
        sizes: int64 [groups], how many rows each has.

    Returns:
        [n, outputs].
    """
    # torch's kernel reads rows of multiples of 16 bytes, in the dtypes that models have.
    aligned = all(size * x.dtype.itemsize % 16 == 0 for size in weights.shape[1:])
    if aligned and x.dtype in (torch.float32, torch.bfloat16) and len(x):
        return F.grouped_mm(x, weights, offs=sizes.cumsum(0).to(torch.int32))
    parts = x.split(sizes.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weights.unbind(0), strict=True)])


_CLASSES: dict[type, type[nn.Module]] = {}
"""Class of the base -> class of the adapted module."""


def stack_shape(experts: Experts, weight: Tensor) -> StackShape:
    """The sizes of a weight [experts, ..., ...] of a module of experts."""
    inputs, outputs = weight.shape[1:] if experts.transposed else weight.shape[:0:-1]
    return StackShape(inputs, outputs, bool(experts.transposed), experts.count)


def attach_experts(module: nn.Module, experts: Experts, name: str, spec: LoraSpec, dtype: torch.dtype | None) -> None:
    """Adapt one matrix of every expert in place; the adapter is left uninitialised.

    Args:
        module: on meta or real; another matrix of it may be adapted already.
        experts: what it is.
        name: of the weight, one of `experts.matrices`.
        spec: rank, alpha, dropout.
        dtype: of the adapter; the base weight's when left out.
    """
    weight = module.get_parameter(name)
    adapter = ExpertsAdapter(stack_shape(experts, weight), spec, device=weight.device, dtype=dtype or weight.dtype)
    if not isinstance(module, LoraExperts):
        base = type(module)
        if base not in _CLASSES:
            _CLASSES[base] = type(f"Lora{base.__name__}", (LoraExperts, base), {"__module__": __name__})
        module.__class__ = _CLASSES[base]
        module.lora = nn.ModuleDict()
    cast(LoraExperts, module).lora[name] = adapter.train(module.training)


def detach_experts(module: LoraExperts) -> None:
    """Remove all adapters of a module of experts and put the class back; the base weights are left as they are."""
    del module.lora
    module.__class__ = type(module).__mro__[2]


Adapted = LoraLayer | LoraEmbedding | ExpertsAdapter
"""What carries `lora_A`, `lora_B`, `lora_spec` and `lora_shape`."""


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Everything that is adapted, in the model's order: linear layers and the table of tokens by full name, matrices of
    experts by the full name of their weight."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer | LoraEmbedding):
            yield name, module
        elif isinstance(module, LoraExperts):
            for key, adapter in module.lora.items():
                yield f"{name}.{key}", cast(ExpertsAdapter, adapter)


def weight_names(name: str, layer: Adapted) -> tuple[str, ...]:
    """Full names of the base weight, A, B and with DoRA the lengths of what `adapted` calls by this name."""
    if not isinstance(layer, ExpertsAdapter):
        lengths = (f"{name}.lora_magnitude_vector.weight",) if layer.lora_spec.dora else ()
        return f"{name}.weight", f"{name}.lora_A.weight", f"{name}.lora_B.weight", *lengths
    module, _, key = name.rpartition(".")
    return name, f"{module}.lora.{key}.lora_A.weight", f"{module}.lora.{key}.lora_B.weight"
