"""Products of a few fp32 rows with a large matrix, at the rate of the processor's multiplications.

A growing text's step reads every weight of the model for a few rows each, and what limits it is how weights come from
main memory: libraries wait for them. Here a matrix is laid out once in panels of some columns, all inputs of a panel
one after the other, which is the order in which they are read; while a panel is multiplied, the next is on its way. A
tile of rows and columns stays in the registers for `_INPUTS` inputs, then is added to what came before: a row's sums
are the same however many rows there are, to the bit, and as exact as MKL's.

The tile is written for LLVM as vector instructions, since Numba's own loops leave no sum in a register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from luthier.hf.decoding.compiled import FEATURES, ahead, compiled
from luthier.hf.decoding.lean_cpu import Floats

_WIDE = "+avx512f" in FEATURES
# numbers of a vector, rows and vectors of a tile: all but a few registers hold sums
_LANES, _ROWS, _VECTORS = (16, 8, 3) if _WIDE else (8, 4, 3)
_COLUMNS = _LANES * _VECTORS
_LINES = 4 * _COLUMNS // 64
"""Lines of memory that an input's part of a panel takes."""
_INPUTS = 192
"""After so many a sum is added to the one before: rounding grows with the root of the terms in a row."""


def suits(weight: Tensor) -> bool:
    """Whether a matrix [outputs, inputs] can be laid out in panels here."""
    known = _WIDE or ("+avx2" in FEATURES and "+fma" in FEATURES)
    return known and weight.dtype == torch.float32 and weight.device.type == "cpu"


class Panels:
    """Matrices laid out in panels, as one.

    Args:
        weights: fp32 [outputs, inputs] each, on the CPU.
    """

    def __init__(self, *weights: Tensor) -> None:
        self._outputs = sum(weight.shape[0] for weight in weights)
        self._inputs = weights[0].shape[1]
        count = -(-self._outputs // _COLUMNS)
        # PyTorch's memory begins with a line
        self._panels = torch.zeros(count, self._inputs, _COLUMNS, dtype=torch.float32, device="cpu")
        self._array: Floats = self._panels.numpy()
        start = 0
        for weight in weights:
            _lay_out(weight.detach().contiguous().numpy(), start, self._array)
            start += weight.shape[0]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., inputs] -> [..., outputs], those of one weight after those of another.

        Raises:
            ValueError: x has another dtype, or other inputs.
        """
        shape = x.shape
        if x.dtype != torch.float32 or shape[-1] != self._inputs:
            raise ValueError(f"panels of {self._inputs} fp32 inputs are not for {shape[-1]} of {x.dtype}")
        rows = (x if len(shape) == 2 else x.reshape(-1, self._inputs)).contiguous().numpy()
        found = torch.empty(len(rows), self._outputs, dtype=torch.float32, device="cpu")
        _multiply(rows, self._array, found.numpy())
        if bias is not None:
            found.add_(bias)
        return found if len(shape) == 2 else found.view(*shape[:-1], self._outputs)


def _tile_as(
    typing: Any, x: Any, x_row: Any, panel: Any, out: Any, out_row: Any, inputs: Any, adds: Any, soon: Any
) -> Any:
    """The product of a tile's rows with a panel, over some inputs, in registers.

    Its arguments are addresses and numbers of elements: of the rows and how far they are from one another; of the
    panel; of the tile in the outputs and how far its rows are from one another; how many inputs; whether to add to what
    is in the tile; and what of memory will be needed soon, a line for each input.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_row, panel, out, out_row, inputs, adds, soon = arguments
        number, word, index = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(number, _LANES)
        nothing, everywhere = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES)
        fused = ir.FunctionType(vector, [vector, vector, vector])
        fma = cgutils.get_or_insert_function(builder.module, fused, f"llvm.fma.v{_LANES}f32")
        panel, out = (builder.inttoptr(address, number.as_pointer()) for address in (panel, out))
        soon = builder.inttoptr(soon, ir.IntType(8).as_pointer())
        # each row's address in a register of its own: LLVM would compute it from another row's in each turn
        same = ir.FunctionType(index, [index])
        starts = [builder.add(x, builder.mul(x_row, index(4 * row))) for row in range(_ROWS)]
        starts = [builder.asm(same, "", "=r,0", [start], False) for start in starts]
        rows = [builder.inttoptr(start, number.as_pointer()) for start in starts]

        def vectors(base: Any) -> list[Any]:
            places = [builder.gep(base, [index(_LANES * v)]) for v in range(_VECTORS)]
            return [builder.bitcast(place, vector.as_pointer()) for place in places]

        zeros = ir.Constant(vector, [0.0] * _LANES)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(_VECTORS)] for _ in range(_ROWS)]
        with cgutils.for_range(builder, inputs) as loop:
            of_panel = vectors(builder.gep(panel, [builder.mul(loop.index, index(_COLUMNS))]))
            columns = [builder.load(place, align=4 * _LANES) for place in of_panel]
            ahead(builder, builder.gep(soon, [builder.mul(loop.index, index(64))]))
            for row, held in zip(rows, sums, strict=True):
                one = builder.insert_element(nothing, builder.load(builder.gep(row, [loop.index])), word(0))
                spread = builder.shuffle_vector(one, nothing, everywhere)
                for column, total in zip(columns, held, strict=True):
                    builder.store(builder.call(fma, [spread, column, builder.load(total)]), total)
        with builder.if_else(builder.icmp_signed("!=", adds, index(0))) as (more, first):
            for branch, plus in ((more, True), (first, False)):
                with branch:
                    for row, held in enumerate(sums):
                        places = vectors(builder.gep(out, [builder.mul(out_row, index(row))]))
                        for place, total in zip(places, held, strict=True):
                            found = builder.load(total)
                            found = builder.fadd(builder.load(place, align=4), found) if plus else found
                            builder.store(found, place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), generate


_tile: Any = intrinsic(_tile_as)


@compiled
def _multiply(x: Floats, panels: Floats, out: Floats) -> None:
    """out <- x @ the panels, x [n, inputs] and out [n, outputs] contiguous."""
    count, inputs = x.shape
    outputs = out.shape[1]
    last = np.zeros((_ROWS, inputs if count % _ROWS else 0), np.float32)  # rows of a tile that is not full
    for row in range(count % _ROWS):
        last[row] = x[count - count % _ROWS + row]
    edge = np.empty((_ROWS, _COLUMNS), np.float32)
    for panel in range(panels.shape[0]):
        column = panel * _COLUMNS
        columns = min(_COLUMNS, outputs - column)
        following = panels.ctypes.data + 4 * (panel + 1) * inputs * _COLUMNS
        for row in range(0, count, _ROWS):
            here = min(_ROWS, count - row)
            whole = here == _ROWS and columns == _COLUMNS
            start = x.ctypes.data + 4 * row * inputs if here == _ROWS else last.ctypes.data
            place = out.ctypes.data + 4 * (row * outputs + column) if whole else edge.ctypes.data
            line = following + 64 * inputs * (row // _ROWS % _LINES)
            for low in range(0, inputs, _INPUTS):
                a, b = start + 4 * low, panels.ctypes.data + 4 * (panel * inputs + low) * _COLUMNS
                some = min(_INPUTS, inputs - low)
                _tile(a, inputs, b, place, outputs if whole else _COLUMNS, some, low, line + 64 * low)
            if not whole:
                for i in range(here):
                    for j in range(columns):
                        out[row + i, column + j] = edge[i, j]


@compiled
def _lay_out(weight: Floats, start: int, panels: Floats) -> None:
    """Put the rows of a weight [outputs, inputs] into columns of the panels, from column `start` of all on."""
    for row in range(weight.shape[0]):
        place = start + row
        panel, column = panels[place // _COLUMNS], place % _COLUMNS
        for i in range(weight.shape[1]):
            panel[i, column] = weight[row, i]
