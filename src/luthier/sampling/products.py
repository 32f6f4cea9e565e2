"""The linear layers of a model in groups that share their input, one product each, with the adapters of several texts.

Adapters lie side by side: y = W x + B ((A x) * m), where A and B are those of all adapters, one after the other, and m
is 0 in a row except at the ranks of the row's own adapter, where it is the adapter's scale. What the others add to a
row is 0, exactly. Whether their company changes how a row's own terms are summed is tried when adapters come together;
if it does, each gets products of its own. Products of adapters are always of as many rows as there are slots, or while
texts are read of as many as are read at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luthier.adapters import LoraLayer, is_adapter_weight, layer_factor
from luthier.adapters.rows import RowsHead
from luthier.hf.decoding.lean import READING
from luthier.hf.decoding.slots import padded
from luthier.sampling.packed import Copies, Copy, Forward, can_pack, laid_out, packable, stamp_of

_EVEN = 16
"""Ranks are filled up to a multiple of this many, so that all adapters lie alike."""
_KEPT = 16
"""Sets of adapters whose matrices are kept side by side."""


_NUMBERS = itertools.count()


class Adapter:
    """The adapters of one model, to be used beside a base that it shares.

    Args:
        model: carries them; its weights are read as they are at each step.

    Attributes:
        layers: full name -> adapted layer.
        number: adapters that came later have higher ones.
        finite: whether its weights were when they were last looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        self._weights = [p for one in self.layers.values() for name, p in one.named_parameters() if "lora_" in name]
        self._stamp: tuple[tuple[int, int], ...] = ()
        self.number = next(_NUMBERS)
        self.finite = True

    def look(self) -> bool:
        """Whether its weights are others than they were at the last look."""
        stamp = stamp_of(*self._weights)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.finite = all(bool(weight.isfinite().all()) for weight in self._weights)
        return True


Columns = tuple[tuple[int, int, float], ...]
"""For each adapter beside a group: its number in the set, how many ranks it has there, filled up, and its scale."""


@dataclass(frozen=True, slots=True)
class _Low:
    """The low-rank products of some adapters beside one group.

    Attributes:
        down: [n, inputs] -> [n, ranks].
        up: [n, ranks] -> [n, outputs].
        columns: whose the ranks are.
        dtype: of the matrices.
    """

    down: Forward
    up: Forward
    columns: Columns
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Grown:
    """What DoRA makes of one group's outputs: y g + shift, a row of each for every adapter, then one for none.

    Attributes:
        by: g, [adapters + 1, outputs].
        shift: [adapters + 1, outputs].
    """

    by: Tensor
    shift: Tensor

    def __call__(self, y: Tensor, owners: Tensor) -> Tensor:
        """y [..., outputs], rows of texts with these adapters: int64 [rows], -1 for none, or one for all."""
        rows = y.reshape(-1, y.shape[-1]).to(self.by.dtype)
        return torch.addcmul(self.shift[owners], rows, self.by[owners]).to(y.dtype).view(y.shape)


class JoinedProducts:
    """`hf.decoding.lean.Products`, packed where it can be done, with adapters beside them.

    Args:
        model: whose layers they are.
        groups: linear layers that share their input.
        most: as many rows as there are slots.
        copies: shared with other models over the same weights.
    """

    def __init__(self, model: Any, groups: Sequence[tuple[nn.Module, ...]], most: int, copies: Copies) -> None:
        self._head = model.get_output_embeddings()
        self._groups = [*groups, *([(self._head,)] if _is_linear(self._head) else [])]
        names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
        self._names = [tuple(names[layer] for layer in group) for group in self._groups]
        self._shared = {name: tensor for name, tensor in _tensors(model) if not is_adapter_weight(name)}
        self._dtype = next(iter(self._groups[0])).weight.dtype
        self._most = most
        self._copies = copies
        self._packed: list[Copy | None] = [None] * len(self._groups)
        self._ready: dict[bool, list[Forward]] = {}
        self._bases: list[Forward] = []
        self._sets: dict[tuple[Adapter, ...], list[tuple[list[_Low], _Grown | None]]] = {}
        self._agree: dict[Any, bool] = {}
        self._present: list[Adapter] = []
        self._owners: list[Adapter | None] = []
        self._beside_groups: list[tuple[list[_Low], _Grown | None]] = []
        self._numbers: Tensor | None = None
        self._masks: dict[Columns, Tensor] = {}

    def takes(self, model: Any) -> bool:
        """Whether another model is this one's base with adapters that can be beside it in one product."""
        own = {name: tensor for name, tensor in _tensors(model) if not is_adapter_weight(name)}
        if own.keys() != self._shared.keys() or any(own[name] is not tensor for name, tensor in self._shared.items()):
            return False
        known = {name for group in self._names for name in group}
        adapted = {name.rpartition(".lora_")[0] for name, _ in model.named_parameters() if is_adapter_weight(name)}
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        return adapted <= known and all(layer.lora_A.weight.dtype == self._dtype for layer in layers)

    @contextmanager
    def used(self, owners: Sequence[Adapter | None], *, packed: bool, text: bool = False) -> Iterator[None]:
        """Within, products are those of rows with these adapters, and the model's head is one of them.

        Args:
            owners: of each row; None for the base as it is.
            packed: from copies, which are made where there are none.
            text: rows are those of whole texts, all of the only owner.
        """
        if packed not in self._ready:
            self._ready[packed] = [self._base(number, packed) for number in range(len(self._groups))]
        self._bases = self._ready[packed]
        self._owners = list(owners)
        self._present = sorted({owner for owner in owners if owner is not None}, key=lambda owner: owner.number)
        self._beside_groups = self._side_by_side() if self._present else [([], None)] * len(self._groups)
        self._text = text
        self.rows(0, len(owners))
        overridden = _is_linear(self._head)
        try:
            if overridden:
                self._head.__dict__["forward"] = lambda x: self(len(self._groups) - 1, x)
            yield
        finally:
            if overridden:
                self._head.__dict__.pop("forward", None)

    def rows(self, start: int, size: int) -> None:
        """From now on inputs are of the texts from row `start` on, filled up to `size` rows."""
        numbers: dict[Adapter | None, int] = {owner: number for number, owner in enumerate(self._present)}
        found = [numbers.get(owner, -1) for owner in self._owners[start : start + size]]
        self._numbers = torch.tensor(found + [-1] * (self._most - len(found)), device=self._head.weight.device)
        self._masks = {}

    def __call__(self, group: int, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs of the group's layers, one after the other]."""
        y = self._bases[group](x)
        lows, grown = self._beside_groups[group]
        for low in lows:
            flat = x.reshape(-1, x.shape[-1]).to(low.dtype)
            count = len(flat)
            if self._text:
                z = low.down(padded(flat, READING)).mul_(low.columns[0][2])
            else:
                z = low.down(padded(flat, self._most)).mul_(self._mask(low))
            y = (y + low.up(z)[:count].view(y.shape)).to(y.dtype)
        if grown is not None:
            assert self._numbers is not None
            y = grown(y, self._numbers[:1] if self._text else self._numbers[: y.numel() // y.shape[-1]])
        return y

    def forget(self, adapter: Adapter) -> None:
        """Let go of what was made of an adapter's weights."""
        self._sets = {key: lows for key, lows in self._sets.items() if adapter not in key}

    def changed(self) -> None:
        """Copy weights of the model again if they are others than those that were copied."""
        self._ready, self._sets = {}, {}  # DoRA's lengths are measured by the base's

    def give_up(self) -> None:
        """Free the copies."""
        self._packed = [None] * len(self._groups)
        self._ready, self._bases, self._sets, self._beside_groups = {}, [], {}, []

    def _mask(self, low: _Low) -> Tensor:
        """[most, ranks]: the scale where a rank is of the row's adapter, else 0."""
        if low.columns not in self._masks:
            assert self._numbers is not None
            parts = [
                (self._numbers == number).to(low.dtype).mul_(scale)[:, None].expand(-1, ranks)
                for number, ranks, scale in low.columns
            ]
            self._masks[low.columns] = torch.cat(parts, 1)
        return self._masks[low.columns]

    def _base(self, number: int, packed: bool) -> Forward:
        group = self._groups[number]
        if not packed or not all(packable(layer) for layer in group):
            return _plain(group)
        weights = [cast(Tensor, layer.weight) for layer in group]
        copied = self._packed[number]
        if copied is None or copied.stamp != stamp_of(*weights):
            copied = self._packed[number] = self._copies.of(*weights)
        biases = [cast("Tensor | None", layer.bias) for layer in group]
        if all(bias is None for bias in biases):
            return copied.product
        if any(bias is None for bias in biases):
            return _plain(group)
        bias = torch.cat(cast("list[Tensor]", biases))
        return lambda x: copied.product(x, bias)

    def _side_by_side(self) -> list[tuple[list[_Low], _Grown | None]]:
        """For each group the products of the adapters that are present, and what DoRA makes of the sum."""
        key = tuple(self._present)
        if key not in self._sets:
            if len(self._sets) >= _KEPT:
                self._sets.clear()
            self._sets[key] = [(self._beside(n), self._grown(n)) for n in range(len(self._groups))]
        return self._sets[key]

    def _grown(self, group: int) -> _Grown | None:
        found = [[adapter.layers.get(name) for name in self._names[group]] for adapter in self._present]
        dora = [layer for row in found for layer in row if layer is not None and layer.lora_spec.dora]
        if not dora:
            return None
        sizes = [cast(Tensor, layer.weight).shape[0] for layer in self._groups[group]]
        whole = dora[0].lora_magnitude_vector.weight.new_ones(len(found) + 1, sum(sizes))
        by, shift = list(whole.split(sizes, 1)), list(torch.zeros_like(whole).split(sizes, 1))
        for number, row in enumerate(found):
            for place, layer in enumerate(row):
                if layer is not None and layer.lora_spec.dora:
                    by[place][number] = layer_factor(layer).detach()
                    if layer.bias is not None:
                        shift[place][number] = (1 - by[place][number]) * layer.bias.detach()
        return _Grown(torch.cat(by, 1), torch.cat(shift, 1))

    def _beside(self, group: int) -> list[_Low]:
        downs, ups, columns = [], [], []
        outputs = [cast(Tensor, layer.weight).shape[0] for layer in self._groups[group]]
        for number, adapter in enumerate(self._present):
            found = [(place, adapter.layers.get(name)) for place, name in enumerate(self._names[group])]
            layers = [(place, layer) for place, layer in found if layer is not None]
            if not layers:
                continue
            down = torch.cat([layer.lora_A.weight.detach() for _, layer in layers])
            up = down.new_zeros(sum(outputs), len(down))
            rank = 0
            for place, layer in layers:
                part = layer.lora_B.effective.detach()
                start = sum(outputs[:place])
                up[start : start + outputs[place], rank : rank + part.shape[1]] = part
                rank += part.shape[1]
            scales = {layer.lora_spec.scale for _, layer in layers}
            if len(scales) > 1:  # each has its own: they go into A
                of_ranks = [torch.full((layer.lora_spec.rank, 1), layer.lora_spec.scale) for _, layer in layers]
                down = down * torch.cat(of_ranks).to(down)
                scales = {1.0}
            more = -len(down) % _EVEN
            downs.append(F.pad(down, (0, 0, 0, more)))
            ups.append(F.pad(up, (0, more)))
            columns.append((number, len(down) + more, scales.pop()))
        if not downs:
            return []
        if len(downs) > 1 and self._company_counts(downs, sum(outputs)):
            return [_low([down], [up], (column,)) for down, up, column in zip(downs, ups, columns, strict=True)]
        return [_low(downs, ups, tuple(columns))]

    def _company_counts(self, downs: Sequence[Tensor], outputs: int) -> bool:
        """Whether adapters of these sizes, side by side, give other bits than each by itself; tried on random ones."""
        key = (downs[0].shape[1], outputs, tuple(len(down) for down in downs))
        if key not in self._agree:
            generator = torch.Generator().manual_seed(0)

            def random(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=generator).to(downs[0])

            x = random(self._most, key[0])
            drawn = [random(*down.shape) for down in downs], [random(outputs, len(down)) for down in downs]
            whole = _low(*drawn, ())
            same, start = True, 0
            for down, up in zip(*drawn, strict=True):
                mask = x.new_zeros(sum(key[2]))
                mask[start : start + len(down)] = 0.5
                start += len(down)
                one = _low([down], [up], ())
                same = same and torch.equal(whole.up(whole.down(x) * mask), one.up(one.down(x) * 0.5))
            self._agree[key] = same
        return not self._agree[key]


def _low(downs: Sequence[Tensor], ups: Sequence[Tensor], columns: Columns) -> _Low:
    return _Low(_matrix(torch.cat(list(downs))), _matrix(torch.cat(list(ups), 1)), columns, downs[0].dtype)


def _matrix(weight: Tensor) -> Forward:
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return lambda x: F.linear(x, weight)
    return Copy((weight,), (), laid_out(weight)).product


def _plain(group: Sequence[nn.Module]) -> Forward:
    """The layers themselves, without their adapters."""

    def forward(x: Tensor) -> Tensor:
        found = [base(x) for base in bases]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    bases = [_base_forward(layer) for layer in group]
    return forward


def _base_forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, LoraLayer):
        return lambda x: cast(Tensor, super(LoraLayer, layer).forward(x))
    return cast("Callable[[Tensor], Tensor]", type(layer).forward.__get__(layer))


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) and not isinstance(module, RowsHead)  # which computes more than a product


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
