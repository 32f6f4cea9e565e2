"""A second copy of a model's matrices, laid out as they are read fastest, for as long as texts grow.

The step of a small batch reads every weight for a few rows each. In fp32 the library that torch calls by default does
that at half the speed of a matrix laid out for it (`hf/decoding/panels.py`; oneDNN's layout where threads share the
work), and in another order for each number of rows; in bf16 each call lays the matrix out again. A copy is made when
texts begin to grow and given up when none does; a weight that has changed in between (its storage, or the count that
every operation in place adds to) is copied again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from luthier.adapters.dora import layer_factor, rescaled
from luthier.adapters.layer import AdapterMatrix, LoraLayer
from luthier.errors import first_line
from luthier.hf.decoding.loops import loops_work

_log = logging.getLogger(__name__)

_ROWS = 32
"""Rows that the layout is chosen for."""
_PLAIN = (nn.Parameter, Tensor)

Forward = Callable[[Tensor], Tensor]


class Matrix(Protocol):
    """Weights laid out anew as one matrix."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., inputs] -> [..., outputs], those of one weight after those of another."""
        ...


class _OfOneDnn:
    """As oneDNN reads it fastest.

    Args:
        weights: [outputs, inputs] each.
    """

    def __init__(self, *weights: Tensor) -> None:
        whole = weights[0].detach() if len(weights) == 1 else torch.cat(weights)
        self._tensor = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._tensor, bias, "none", [], ""))


@dataclass(slots=True, weakref_slot=True)
class Copy:
    """A copy of weights; it keeps them, so that no others can come to have their address."""

    weights: tuple[Tensor, ...]
    stamp: tuple[tuple[int, int], ...]
    matrix: Matrix

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., inputs] -> [..., outputs], those of one weight after those of another."""
        return self.matrix.product(x, bias)


class Copies:
    """Copies of weights, one for all models that have them in use."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[tuple[int, ...], Copy] = WeakValueDictionary()

    def of(self, *weights: Tensor) -> Copy:
        """The copy of weights as they are now."""
        key = tuple(map(id, weights))
        found = self._copies.get(key)
        if found is None or found.stamp != stamp_of(*weights):
            found = self._copies[key] = Copy(weights, stamp_of(*weights), laid_out(*weights))
        return found


def stamp_of(*tensors: Tensor) -> tuple[tuple[int, int], ...]:
    """What changes when tensors do: addresses, and the counts that operations in place add to."""
    return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)


@torch.no_grad()
def laid_out(*weights: Tensor) -> Matrix:
    """Weights [outputs, inputs] as one matrix."""
    if weights[0].dtype == torch.float32 and torch.get_num_threads() == 1 and loops_work():
        from luthier.hf.decoding.panels import Panels, suits  # Numba, which takes half a second to import

        if suits(weights[0]):
            return Panels(*weights)
    return _OfOneDnn(*weights)


class PackedLinears:
    """The linear layers of a model, adapters and their bases among them, multiplied from packed copies.

    Args:
        model: on the CPU in fp32 or bf16; other layers are left as they are.
        copies: shared with other models over the same weights.
    """

    def __init__(self, model: nn.Module, copies: Copies) -> None:
        self._copies = copies
        self._layers = [module for module in model.modules() if packable(module)]
        self._packed: dict[int, tuple[tuple[tuple[int, int], ...], Forward]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Layers multiply from their copies within; those are made where there is none of the weight as it is."""
        for number, layer in enumerate(self._layers):
            stamp = stamp_of(cast(Tensor, layer.weight))
            if number not in self._packed or self._packed[number][0] != stamp:
                self._packed[number] = (stamp, _forward_of(layer, self._copies))
        try:
            for number, layer in enumerate(self._layers):
                layer.__dict__["forward"] = self._packed[number][1]
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)

    def give_up(self) -> None:
        """Free the copies."""
        self._packed.clear()


def packable(module: nn.Module) -> bool:
    """A plain linear layer, adapted or not, or a matrix of an adapter, that nobody else has given a forward."""
    base = type(module).__mro__[2] if isinstance(module, LoraLayer) else type(module)
    if base is AdapterMatrix and module.mask is not None:
        return False
    if base not in (nn.Linear, AdapterMatrix) or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return False
    weight = module.weight
    usual = type(weight) in _PLAIN and cast(Tensor, weight).device.type == "cpu"
    return usual and can_pack(cast(Tensor, weight).dtype)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether matrices of a dtype can be packed here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        weight = torch.ones(8, 8, dtype=dtype)
        Copies().of(weight).product(weight)
    except (RuntimeError, AttributeError) as error:
        _log.info("matrices are not packed: %s", first_line(error))
        return False
    return True


def _forward_of(layer: nn.Module, copies: Copies) -> Forward:
    """What stands for a layer's forward; the bias is read when it is used."""
    copied = copies.of(cast(Tensor, layer.weight))

    def product(x: Tensor) -> Tensor:
        return copied.product(x, cast("Tensor | None", getattr(layer, "bias", None)))

    if not isinstance(layer, LoraLayer):
        return product

    kept: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def adapted(x: Tensor) -> Tensor:
        y = product(x)
        z = layer.lora_A(x.to(layer.lora_A.weight.dtype))  # modules of their own, packed as well
        y = cast(Tensor, (y + layer.lora_B(z) * layer.lora_spec.scale).to(y.dtype))
        if not layer.lora_spec.dora:
            return y
        stamp = stamp_of(*layer.parameters())
        if stamp not in kept:
            kept.clear()
            kept[stamp] = layer_factor(layer).detach()
        return rescaled(layer, y, kept[stamp])

    return adapted
