"""A second copy of a model's matrices, as oneDNN reads them fastest, for as long as texts grow.

The step of a small batch reads every weight for a few rows each. In fp32 the library that torch calls by default does
that at half the speed of oneDNN on a matrix laid out for it, and in another order for each number of rows; in bf16
each call lays the matrix out again. A copy is made when texts begin to grow and given up when none does; a weight that
has changed in between (its storage, or the count that every operation in place adds to) is copied again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from luthier.adapters.layer import AdapterMatrix, LoraLayer
from luthier.errors import first_line

_log = logging.getLogger(__name__)

_ROWS = 32
"""Rows that the layout is chosen for."""
_PLAIN = (nn.Parameter, Tensor)

Forward = Callable[[Tensor], Tensor]


@dataclass(slots=True, weakref_slot=True)
class _Copy:
    """A weight laid out anew; it keeps the weight, so that no other can come to have its address."""

    weight: Tensor
    stamp: tuple[int, int]
    tensor: Tensor


class Copies:
    """Copies of weights, one for each weight that any model has in use."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[int, _Copy] = WeakValueDictionary()

    def of(self, weight: Tensor) -> _Copy:
        """The copy of a weight as it is now."""
        found = self._copies.get(id(weight))
        if found is None or found.stamp != _stamp(weight):
            copied = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            found = self._copies[id(weight)] = _Copy(weight, _stamp(weight), copied)
        return found


def _stamp(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


class PackedLinears:
    """The linear layers of a model, adapters and their bases among them, multiplied from packed copies.

    Args:
        model: on the CPU in fp32 or bf16; other layers are left as they are.
        copies: shared with other models over the same weights.
    """

    def __init__(self, model: nn.Module, copies: Copies) -> None:
        self._copies = copies
        self._layers = [module for module in model.modules() if _packable(module)]
        if self._layers and (fault := _fault(self._layers[0])):
            _log.info("matrices are not packed: %s", fault)
            self._layers = []
        self._packed: dict[int, tuple[tuple[int, int], Forward]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Layers multiply from their copies within; those are made where there is none of the weight as it is."""
        for number, layer in enumerate(self._layers):
            stamp = _stamp(cast(Tensor, layer.weight))
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


def _packable(module: nn.Module) -> bool:
    """A plain linear layer, adapted or not, or a matrix of an adapter, that nobody else has given a forward."""
    base = type(module).__mro__[2] if isinstance(module, LoraLayer) else type(module)
    if base not in (nn.Linear, AdapterMatrix) or "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return False
    weight = module.weight
    usual = type(weight) in _PLAIN and cast(Tensor, weight).device.type == "cpu"
    return usual and cast(Tensor, weight).dtype in (torch.float32, torch.bfloat16)


def _fault(layer: nn.Module) -> str:
    """Why layers cannot be packed here, "" if one can be."""
    try:
        weight = cast(Tensor, layer.weight)
        x = torch.ones(_ROWS, weight.shape[1], dtype=weight.dtype)
        _product(weight, lambda: None, Copies())(x)
    except (RuntimeError, AttributeError) as error:
        return first_line(error)
    return ""


@torch.no_grad()
def _product(weight: Tensor, bias: Callable[[], Tensor | None], copies: Copies) -> Forward:
    """x [..., inputs] -> [..., outputs] from a copy of a weight; the bias is read when it is used."""
    copied = copies.of(weight)

    def forward(x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, copied.tensor, bias(), "none", [], ""))

    return forward


def _forward_of(layer: nn.Module, copies: Copies) -> Forward:
    """What stands for a layer's forward."""
    product = _product(cast(Tensor, layer.weight), lambda: cast("Tensor | None", getattr(layer, "bias", None)), copies)
    if not isinstance(layer, LoraLayer):
        return product

    def adapted(x: Tensor) -> Tensor:
        y = product(x)
        z = layer.lora_A(x.to(layer.lora_A.weight.dtype))  # modules of their own, packed as well
        return cast(Tensor, (y + layer.lora_B(z) * layer.lora_spec.scale).to(y.dtype))

    return adapted
