"""A weight in four bits that is a tensor like any other: NF4 codes, and a scale for every 64 of them.

Dettmers et al. 2023 (https://arxiv.org/abs/2305.14314): each block of 64 numbers, in the order in which they lie, is
divided by its largest magnitude and rounded to the nearest of 16 quantiles of a normal distribution. Double
quantisation keeps the scales in eight bits: less their mean, in blocks of 256. The kernels are those of bitsandbytes,
so the numbers are too, to the bit, on the CPU and on CUDA.

`Nf4Weight` has the shape and the dtype of what it stands for. A linear layer makes the plain weight for its product
and lets go of it; the backward pass makes it again. Whatever else is done to it is done to the plain weight.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from luthier.errors import ConfigError

BLOCK = 64
"""Numbers that share a scale."""
_OUTER = 256
"""Scales that share a scale of their own."""
_PIECE = 1 << 20
"""Numbers that are quantised at a time: what that needs beside is many times their size."""
_aten: Any = torch.ops.aten


@cache
def kernels() -> Any:
    """bitsandbytes' operations.

    Raises:
        ConfigError: it is not installed.
    """
    # It complains that a package is missing from which it would fetch a kernel for evaluation; here nobody uses that.
    said = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            f"quantised weights need bitsandbytes ({error})",
            where="adapter.quantize",
            remedy="pip install 'luthier[qlora]'",
        ) from error
    finally:
        said.setLevel(level)
    return torch.ops.bitsandbytes


@cache
def _eight_bits(device: torch.device) -> Tensor:
    """float32 [256]: what the codes of doubly quantised scales mean."""
    kernels()
    made = importlib.import_module("bitsandbytes.functional").create_dynamic_map()
    return cast(Tensor, made).to(device)


@dataclass(frozen=True, slots=True)
class Outer:
    """What all scales of a weight have in common when they are quantised themselves.

    Attributes:
        scales: float32 [ceil(n / 256)], of the whole weight, also where only a part of it lies here.
        mean: float32 [], of all scales.
        part: (first row, first column, columns of the whole) in scales, where this is a part; None for the whole. Of a
            transposed layer rows are outputs.
    """

    scales: Tensor
    mean: Tensor
    part: tuple[int, int, int] | None = None


class Nf4Weight(Tensor):
    """A quantised weight, or this rank's part of one.

    Attributes:
        codes: uint8 [ceil(n / 2)], two numbers a byte, the first in the high bits.
        scales: [ceil(n / 64)], uint8 where they are quantised, else float32.
        common: of quantised scales.
        pieces: 0 where blocks run along the rows of the weight as it lies. Of a transposed layer's weight [inputs,
            outputs] they run along the inputs, as in bitsandbytes: here are in how many pieces, each [outputs, inputs /
            pieces], codes and scales lie one after the other.
        matrix: its shape as the layer's, in which places are counted, whatever the shape that it is seen in.
    """

    codes: Tensor
    scales: Tensor
    common: Outer | None
    pieces: int
    matrix: torch.Size

    @staticmethod
    def __new__(
        cls: type[Nf4Weight], codes: Tensor, *_: Any, shape: torch.Size, dtype: torch.dtype, **__: Any
    ) -> Nf4Weight:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        outer: Outer | None,
        *,
        shape: torch.Size,
        dtype: torch.dtype,
        pieces: int = 0,
        matrix: torch.Size | None = None,
    ) -> None:
        self.codes, self.scales, self.common, self.pieces = codes, scales, outer, pieces
        self.matrix = shape if matrix is None else matrix

    @property
    def _rows(self) -> tuple[int, ...]:
        """The shape in which codes lie: blocks run along the last dimension."""
        if not self.pieces:
            return tuple(self.matrix)
        inputs, outputs = self.matrix
        return self.pieces, outputs, inputs // self.pieces

    def dense(self) -> Tensor:
        """The weight that it stands for, made anew."""
        scales = self.float_scales()
        # float64 is for proofs: the kernels know none, and what they make is exact in it
        made_as = torch.float32 if self.dtype == torch.float64 else self.dtype
        rows = self._rows
        numel = self.numel()
        shape = (numel // rows[-1], rows[-1]) if numel and rows[-1] % 2 == 0 else (1, numel)
        made: Tensor = kernels().dequantize_4bit.default(self.codes, scales, BLOCK, "nf4", shape, made_as)
        if self.pieces:
            made = made.view(rows).mT.reshape(self.matrix).contiguous()
        return made.view(self.shape).to(self.dtype)

    def float_scales(self) -> Tensor:
        """float32: the scale of each block."""
        if self.common is None:
            return self.scales
        table, outer = _eight_bits(self.device), self.common
        if outer.part is None:
            made = kernels().dequantize_blockwise.default(self.scales, outer.scales, table, _OUTER, torch.float32)
            return cast(Tensor, made) + outer.mean
        row, column, columns = outer.part
        *pieces, outputs, inputs = self._rows
        here = inputs // BLOCK
        rows = torch.arange(row, row + outputs, device=self.device)[:, None] * columns
        starts = torch.arange(pieces[0] if pieces else 1, device=self.device)[:, None, None] * here
        place = (starts + rows + torch.arange(column, column + here, device=self.device)).view(-1)
        return table[self.scales.int()] * outer.scales[place // _OUTER] + outer.mean

    @property
    def stored(self) -> int:
        """Bytes that it takes."""
        outer = self.common.scales.nbytes + self.common.mean.nbytes if self.common is not None else 0
        return self.codes.nbytes + self.scales.nbytes + outer

    def made_of(self, change: Callable[[Tensor], Tensor], shape: torch.Size | None = None) -> Nf4Weight:
        """The same weight of changed tensors: copied, moved."""
        outer = self.common
        if outer is not None:
            outer = replace(outer, scales=change(outer.scales), mean=change(outer.mean))
        size = self.shape if shape is None else shape
        codes, scales = change(self.codes), change(self.scales)
        how: dict[str, Any] = {"dtype": self.dtype, "pieces": self.pieces, "matrix": self.matrix}
        return Nf4Weight(codes, scales, outer, shape=size, **how)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Nf4Weight({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Nf4Weight:
        if id(self) not in memo:
            made = self.made_of(torch.clone)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
        return cast(Nf4Weight, memo[id(self)])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args else None
        if isinstance(own, Nf4Weight):
            if func in (_aten.detach.default, _aten.alias.default):
                return own.made_of(lambda tensor: tensor)
            if func is _aten.clone.default:
                return own.made_of(torch.clone)
            if func is _aten._to_copy.default and kwargs.get("dtype", own.dtype) == own.dtype:
                device, blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
                return own.made_of(lambda tensor: tensor.to(device=device, non_blocking=blocking, copy=True))
            if func in (_aten.view.default, _aten._unsafe_view.default):  # FSDP keeps a flat view of each part
                shape = torch.empty(own.shape, device="meta").view(args[1]).shape
                return own.made_of(lambda tensor: tensor, shape)
            if func is _aten.as_strided.default and torch.Size(args[1]) == own.shape:
                return own.made_of(lambda tensor: tensor)
        if func in _WITHOUT_VALUES:
            args = torch.utils._pytree.tree_map_only(Nf4Weight, _without_values, args)
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            changed = [arg for arg, said in zip(args, func._schema.arguments, strict=False) if said.is_write]
            if any(isinstance(arg, Nf4Weight) for arg in changed):
                raise TypeError(f"{func} would change a quantised weight in place")
        args, kwargs = torch.utils._pytree.tree_map_only(Nf4Weight, Nf4Weight.dense, (args, kwargs))
        return func(*args, **kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What FSDP gathers: codes and scales, of as many rows on every rank."""
        return (self.codes, self.scales), (outer_size, mesh.get_local_rank())

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The weight whose rows were gathered."""
        if out is not None:
            return None  # of the same memory
        codes, scales = gathered
        shape, place = metadata
        outer = self.common
        if self.pieces:  # which follow each other as the ranks do
            if outer is not None and outer.part is not None:
                row, column, columns = outer.part
                outer = replace(outer, part=(row, column - place * (self.shape[0] // BLOCK), columns))
            pieces = shape[0] // self.shape[0]
            return Nf4Weight(codes, scales, outer, shape=shape, dtype=self.dtype, pieces=pieces), gathered
        if outer is not None and outer.part is not None:
            first, column, columns = outer.part
            first -= place * self.shape[0]
            blocks = shape[0] * columns
            whole = first == 0 and scales.numel() == blocks and len(outer.scales) == -(-blocks // _OUTER)
            outer = replace(outer, part=None if whole else (first, column, columns))
        return Nf4Weight(codes, scales, outer, shape=shape, dtype=self.dtype), gathered


_WITHOUT_VALUES = {
    *(_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
}


def _without_values(weight: Nf4Weight) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4Weight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        dx = gradient @ weight.dense() if ctx.needs_input_grad[0] else None
        db = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if not isinstance(weight, Nf4Weight):
        raise TypeError("a quantised weight is multiplied with, and is no input")
    return cast(Tensor, _Linear.apply(input, weight, bias))


def dense(tensor: Tensor) -> Tensor:
    """A tensor itself, or what a quantised one stands for."""
    return tensor.dense() if isinstance(tensor, Nf4Weight) else tensor


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes in memory."""
    return tensor.stored if isinstance(tensor, Nf4Weight) else tensor.nbytes


def expected_bytes(numel: int, double: bool) -> int:
    """Bytes that a weight of so many numbers will take."""
    blocks = -(-numel // BLOCK)
    return -(-numel // 2) + (blocks + 4 * -(-blocks // _OUTER) + 4 if double else 4 * blocks)


@torch.no_grad()
def quantise(weight: Tensor, *, double: bool, transposed: bool = False) -> Nf4Weight:
    """A whole weight in NF4.

    Args:
        weight: any shape, floating. float64 is rounded to float32 first.
        double: quantise the scales too.
        transposed: it lies as [inputs, outputs]; blocks run along the inputs all the same.
    """
    codes, scales = codes_of(weight.t() if transposed else weight)
    outer = None
    if double:
        scales, outer = quantise_scales(scales)
    return Nf4Weight(codes, scales, outer, shape=weight.shape, dtype=weight.dtype, pieces=int(transposed))


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [ceil(n / 2)] and scales float32 [ceil(n / 64)] of a weight, made piece by piece."""
    flat = weight.detach().reshape(-1)
    flat = flat.float() if flat.dtype == torch.float64 else flat
    pieces = [kernels().quantize_4bit.default(piece, BLOCK, "nf4", torch.uint8) for piece in flat.split(_PIECE)]
    return torch.cat([codes.view(-1) for codes, _ in pieces]), torch.cat([scales.view(-1) for _, scales in pieces])


def quantise_scales(scales: Tensor) -> tuple[Tensor, Outer]:
    """All scales of a weight, float32 [n], in eight bits."""
    mean = scales.mean()
    table = _eight_bits(scales.device)
    codes, outer = kernels().quantize_blockwise.default(scales - mean, table, _OUTER)
    return codes, Outer(outer, mean)
