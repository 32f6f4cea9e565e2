"""What a lean step does between its matrix products, as compiled loops: fp32 on the CPU.

PyTorch takes some twenty operations a layer for it, each over memory of its own, and its attention is made for many
queries at a time: for the few that a growing text has, its time goes into calls. Here a layer is four loops. Each row is
worked on by itself, so that what it gets does not depend on the others, to the bit.

Numba compiles the loops when they are first used, in some seconds, and keeps them beside this file or in its own folder
for the next process.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from luthier.hf.lean_ops import Layer, Places, eps_of

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

# sums in another order, so that they can be vectors; NaN and infinity stay what they are
_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_compiled = njit(fastmath=_SUMS, nogil=True, error_model="numpy", cache=True)
_within = njit(fastmath=_SUMS, nogil=True, error_model="numpy", cache=True, inline="always")


@njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
def _largest(x: Floats, count: int) -> Any:
    """The largest of the first numbers; NaN may be passed over, and shows in what is subtracted from."""
    found = x[0]
    for i in range(count):
        found = max(found, x[i])
    return found


@_within
def _exponentials(x: Floats, count: int, powers: Floats, bits: Ints) -> None:
    """x <- exp(x), to an ulp or two, for x in [-87, 88], where what is outside counts as the nearest.

    2^n e^f with |f| <= ln 2 / 2, a polynomial of degree 7 (Cephes' expf), and 2^n made from its bits.

    Args:
        x: worked on in place.
        count: of its numbers.
        powers: room for as many.
        bits: the same memory as int32.
    """
    for i in range(count):
        v = x[i]
        v = np.float32(-87.0) if v < np.float32(-87.0) else v
        v = np.float32(88.0) if v > np.float32(88.0) else v
        n = np.floor(v * np.float32(1.44269504) + np.float32(0.5))
        f = v - n * np.float32(0.693359375)
        f = f + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * f + np.float32(1.3981999507e-3)
        p = p * f + np.float32(8.3334519073e-3)
        p = p * f + np.float32(4.1665795894e-2)
        p = p * f + np.float32(1.6666665459e-1)
        p = p * f + np.float32(5.0000001201e-1)
        x[i] = p * f * f + f + np.float32(1)
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(count):
        x[i] *= powers[i]


@_compiled
def added_and_normed(x: Floats, more: Floats, weight: Floats, eps: float, normed: Floats) -> None:
    """x <- x + more; normed <- weight * x / sqrt(mean(x^2) + eps). All [n, hidden] and contiguous, weight [hidden]."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        a, b, y = x[row], more[row], normed[row]
        squares = np.float32(0)
        for i in range(width):
            a[i] += b[i]
            squares += a[i] * a[i]
        inverse = np.float32(1) / np.float32(math.sqrt(squares / np.float32(width) + np.float32(eps)))
        for i in range(width):
            y[i] = a[i] * inverse * weight[i]


@_compiled
def normed(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """The same without a sum."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        a, y = x[row], out[row]
        squares = np.float32(0)
        for i in range(width):
            squares += a[i] * a[i]
        inverse = np.float32(1) / np.float32(math.sqrt(squares / np.float32(width) + np.float32(eps)))
        for i in range(width):
            y[i] = a[i] * inverse * weight[i]


@_compiled
def heads_normed(x: Floats, first: int, end: int, weight: Floats, eps: float) -> None:
    """The same norm of each of some heads of x [n, heads, dim], in place."""
    width = x.shape[2]
    for row in range(x.shape[0]):
        for head in range(first, end):
            a = x[row, head]
            squares = np.float32(0)
            for i in range(width):
                squares += a[i] * a[i]
            inverse = np.float32(1) / np.float32(math.sqrt(squares / np.float32(width) + np.float32(eps)))
            for i in range(width):
                a[i] = a[i] * inverse * weight[i]


@_compiled
def heads_turned(x: Floats, heads: int, cos: Floats, sin: Floats) -> None:
    """Rotary positions of the first heads of x [n, heads, dim], in place: x cos + rotate_half(x) sin, cos [n, dim]."""
    half = x.shape[2] // 2
    for row in range(x.shape[0]):
        c, s = cos[row], sin[row]
        for head in range(heads):
            a = x[row, head]
            for i in range(half):
                left, right = a[i], a[half + i]
                a[i] = left * c[i] - right * s[i]
                a[half + i] = right * c[half + i] + left * s[half + i]


@_compiled
def gated(both: Floats, out: Floats, powers: Floats, bits: Ints) -> None:
    """out [n, inner] <- silu(gate) * up, gate and up side by side in both [n, 2 inner]; room for `inner` numbers."""
    inner = out.shape[1]
    for row in range(out.shape[0]):
        gate, up, y = both[row, :inner], both[row, inner:], out[row]
        for i in range(inner):
            y[i] = -gate[i]
        _exponentials(y, inner, powers, bits)
        for i in range(inner):
            y[i] = gate[i] / (np.float32(1) + y[i]) * up[i]


@_compiled
def attended(
    made: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    positions: NDArray[np.int64],
    scale: float,
    out: Floats,
    scores: Floats,
    powers: Floats,
    bits: Ints,
) -> None:
    """Keep each row's key and value, and attend with its queries over all keys that it has.

    Args:
        made: [n, queries + 2 x key heads, dim], rotated; neighbours among the queries share a key head.
        keys: [rows, key heads, places, dim]; the step's are those from `start` on.
        values: the same.
        start: the first row.
        positions: where each row's token stands; its keys are those up to there.
        scale: of the scores.
        out: [n or more, queries x dim].
        scores: room for [queries of a key head, places].
        powers: room for [places].
        bits: the same memory as int32.
    """
    key_heads, dim = keys.shape[1], keys.shape[3]
    queries = made.shape[1] - 2 * key_heads
    together = queries // key_heads
    for row in range(len(positions)):
        place = positions[row]
        length = place + 1
        for head in range(key_heads):
            k, v = keys[start + row, head], values[start + row, head]
            for i in range(dim):
                k[place, i] = made[row, queries + head, i]
                v[place, i] = made[row, queries + key_heads + head, i]
            first = head * together
            number = 0
            while number < together:
                if number + 1 < together:
                    q0, q1 = made[row, first + number], made[row, first + number + 1]
                    s0, s1 = scores[number], scores[number + 1]
                    for place in range(length):
                        a, b = np.float32(0), np.float32(0)
                        for i in range(dim):
                            a += q0[i] * k[place, i]
                            b += q1[i] * k[place, i]
                        s0[place], s1[place] = a * np.float32(scale), b * np.float32(scale)
                    number += 2
                else:
                    q0, s0 = made[row, first + number], scores[number]
                    for place in range(length):
                        a = np.float32(0)
                        for i in range(dim):
                            a += q0[i] * k[place, i]
                        s0[place] = a * np.float32(scale)
                    number += 1
            for number in range(together):
                s = scores[number]
                largest = _largest(s, length)
                for place in range(length):
                    s[place] -= largest
                _exponentials(s, length, powers, bits)
                total = np.float32(0)
                for place in range(length):
                    total += s[place]
                inverse = np.float32(1) / total
                for place in range(length):
                    s[place] *= inverse
                o = out[row, (first + number) * dim : (first + number + 1) * dim]
                for i in range(dim):
                    o[i] = 0
                for place in range(length):
                    for i in range(dim):
                        o[i] += s[place] * v[place, i]


class CompiledBetween:
    """`lean_ops.Between` by the loops above.

    Args:
        places: of the step's tokens.
    """

    def __init__(self, places: Places) -> None:
        self._cos, self._sin = _array(places.cos.contiguous()), _array(places.sin.contiguous())
        self._queries, self._rotated = places.queries, places.queries + places.keys
        self._room = _Room(0)

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """x [n, hidden] after a norm."""
        found = torch.empty_like(x)
        normed(_array(x), *_norm(norm), _array(found))
        return found

    def added(self, x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """x + more [n, hidden], in the memory of x, and that after a norm."""
        found = torch.empty_like(x)
        added_and_normed(_array(x), _array(more), *_norm(norm), _array(found))
        return x, found

    def turned(self, layer: Layer, made: Tensor) -> None:
        """Norms and rotary positions of the queries and keys in made [n, queries + keys + values, dim], in place."""
        array = _array(made)
        if layer.queries is not None and layer.keys is not None:
            heads_normed(array, 0, self._queries, *_norm(layer.queries))
            heads_normed(array, self._queries, self._rotated, *_norm(layer.keys))
        heads_turned(array, self._rotated, self._cos, self._sin)

    def gated(self, layer: Layer, both: Tensor) -> Tensor:
        """silu(gate) * up [n, inner] of gate and up side by side [n, 2 inner]."""
        inner = both.shape[1] // 2
        if len(self._room.powers) < inner:
            self._room = _Room(inner)
        found = both.new_empty(len(both), inner)
        gated(_array(both), _array(found), self._room.powers, self._room.bits)
        return found


class Attention:
    """Attention of some neighbouring rows in one step, in every layer.

    Args:
        start: the first row.
        positions: int64 [count], where each row's token stands.
        queries: heads of queries.
        size: rows of what comes out; those after the first `count` are zeros.
    """

    def __init__(self, start: int, positions: Tensor, queries: int, size: int) -> None:
        self._start, self._positions, self._size = start, positions.numpy(), size
        self._queries = queries
        self._found: Tensor | None = None
        longest = int(positions.max()) + 1
        self._scores, self._room = np.empty((queries, longest), np.float32), _Room(longest)

    def __call__(self, made: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """made [size, queries + keys + values, dim] -> [size, queries x dim]; arenas [rows, key heads, places, dim]."""
        if self._found is None:  # in the memory of the layer before
            self._found = made.new_zeros(self._size, self._queries * made.shape[2])
        arrays = (_array(tensor) for tensor in (made, keys, values))
        rest = (_array(self._found), self._scores, self._room.powers, self._room.bits)
        attended(*arrays, self._start, self._positions, scale, *rest)
        return self._found


class _Room:
    """Memory that exponentials need beside what they are made of.

    Args:
        count: of numbers.
    """

    def __init__(self, count: int) -> None:
        self.powers: Floats = np.empty(count, np.float32)
        self.bits: Ints = self.powers.view(np.int32)


def _array(tensor: Tensor) -> Floats:
    return cast(Floats, tensor.detach().numpy())


def _norm(norm: nn.Module) -> tuple[Floats, float]:
    return _array(cast(Tensor, norm.weight)), cast(float, eps_of(norm))
