"""What a lean step does between its matrix products, as compiled loops: fp32 on the CPU.

PyTorch takes some twenty operations a layer for it, each over memory of its own, and its attention is made for many
queries at a time: for the few that a growing text has, its time goes into calls. Here a layer is four loops. Each row
is worked on by itself, so that what it gets does not depend on the others, to the bit.

Numba compiles the loops when they are first used, in some seconds, and keeps them beside this file or in its own folder
for the next process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor, nn

from luthier.hf.decoding.compiled import ahead, compiled
from luthier.hf.decoding.lean_ops import Layer, Places
from luthier.hf.fast_norm import eps_of

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

_LINE = 16
"""Numbers of a line of the caches."""


def _hint_as(typing: Any, array: Any, row: Any, column: Any) -> Any:
    """Say that the line where array[row, column] lies will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        ahead(builder, cgutils.get_item_pointer(context, builder, kind, made, arguments[1:], wraparound=False))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


_hint: Any = intrinsic(_hint_as)


def _largest_of(x: Floats, count: int) -> Any:
    """The largest of the first numbers; NaN may be passed over, and shows in what is subtracted from."""
    a, b, c, d = x[0], x[0], x[0], x[0]
    whole = count - count % 4
    for i in range(0, whole, 4):
        a, b, c, d = max(a, x[i]), max(b, x[i + 1]), max(c, x[i + 2]), max(d, x[i + 3])
    for i in range(whole, count):
        a = max(a, x[i])
    return max(max(a, b), max(c, d))


_largest = compiled(_largest_of, {"nnan"})


def _exponentials_of(x: Floats, count: int, powers: Floats, bits: Ints) -> None:
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


_exponentials = compiled(_exponentials_of, inline="always")


def _row_normed_of(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    width = len(x)
    squares = np.float32(0)
    for i in range(width):
        squares += x[i] * x[i]
    inverse = np.float32(1) / np.float32(math.sqrt(squares / np.float32(width) + np.float32(eps)))
    for i in range(width):
        out[i] = x[i] * inverse * weight[i]


_row_normed = compiled(_row_normed_of, inline="always")


@compiled
def normed(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out <- weight * x / sqrt(mean(x^2) + eps), x [n, hidden], weight [hidden] (RMSNorm, arXiv:1910.07467)."""
    for row in range(x.shape[0]):
        _row_normed(x[row], weight, eps, out[row])


@compiled
def added_and_normed(x: Floats, more: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """x <- x + more, all [n, hidden]; out <- its norm."""
    for row in range(x.shape[0]):
        a, b = x[row], more[row]
        for i in range(len(a)):
            a[i] += b[i]
        _row_normed(a, weight, eps, out[row])


@compiled
def heads_normed(x: Floats, first: int, end: int, weight: Floats, eps: float) -> None:
    """The norm of each of some heads of x [n, heads, dim], in place."""
    for row in range(x.shape[0]):
        for head in range(first, end):
            _row_normed(x[row, head], weight, eps, x[row, head])


@compiled
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


@compiled
def gated(both: Floats, out: Floats) -> None:
    """out [n, inner] <- silu(gate) * up, gate and up side by side in both [n, 2 inner]."""
    inner = out.shape[1]
    powers = np.empty(inner, np.float32)
    bits = powers.view(np.int32)
    for row in range(out.shape[0]):
        gate, up, y = both[row, :inner], both[row, inner:], out[row]
        for i in range(inner):
            y[i] = -gate[i]
        _exponentials(y, inner, powers, bits)
        for i in range(inner):
            y[i] = gate[i] / (np.float32(1) + y[i]) * up[i]


@compiled
def attended(
    made: Floats,
    keys: Floats,
    values: Floats,
    start: int,
    positions: NDArray[np.int64],
    scale: float,
    out: Floats,
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
    """
    key_heads, dim = keys.shape[1], keys.shape[3]
    queries = made.shape[1] - 2 * key_heads
    together = queries // key_heads
    longest = positions.max() + 1
    scores, powers = np.empty((together, longest), np.float32), np.empty(longest, np.float32)
    bits = powers.view(np.int32)
    for row in range(len(positions)):
        place = positions[row]
        length = place + 1
        for head in range(key_heads):
            k, v = keys[start + row, head], values[start + row, head]
            for i in range(dim):
                k[place, i] = made[row, queries + head, i]
                v[place, i] = made[row, queries + key_heads + head, i]
            # a text's keys and values come from main memory: each is asked for while the one before is worked on
            following = k
            if head + 1 < key_heads:
                following = keys[start + row, head + 1]
            elif row + 1 < len(positions):
                following = keys[start + row + 1, 0]
            first = head * together
            for number in range(0, together - 1, 2):  # two queries at once read a key once
                q0, q1 = made[row, first + number], made[row, first + number + 1]
                s0, s1 = scores[number], scores[number + 1]
                for key in range(length):
                    if number == 0:
                        for i in range(0, dim, _LINE):
                            _hint(v, key, i)
                    a, b = np.float32(0), np.float32(0)
                    for i in range(dim):
                        a += q0[i] * k[key, i]
                        b += q1[i] * k[key, i]
                    s0[key], s1[key] = a * np.float32(scale), b * np.float32(scale)
            if together % 2:
                q0, s0 = made[row, first + together - 1], scores[together - 1]
                for key in range(length):
                    if together == 1:
                        for i in range(0, dim, _LINE):
                            _hint(v, key, i)
                    a = np.float32(0)
                    for i in range(dim):
                        a += q0[i] * k[key, i]
                    s0[key] = a * np.float32(scale)
            for number in range(together):
                s = scores[number]
                largest = _largest(s, length)
                for key in range(length):
                    s[key] -= largest
                _exponentials(s, length, powers, bits)
                total = np.float32(0)
                for key in range(length):
                    total += s[key]
                inverse = np.float32(1) / total
                for key in range(length):
                    s[key] *= inverse
                o = out[row, (first + number) * dim : (first + number + 1) * dim]
                for i in range(dim):
                    o[i] = 0
                whole = length - length % 4
                for key in range(0, whole, 4):
                    if number == 0:
                        for near in range(key, key + 4):
                            for i in range(0, dim, _LINE):
                                _hint(following, near, i)
                    s0, s1, s2, s3 = s[key], s[key + 1], s[key + 2], s[key + 3]
                    for i in range(dim):
                        o[i] += s0 * v[key, i] + s1 * v[key + 1, i] + s2 * v[key + 2, i] + s3 * v[key + 3, i]
                for key in range(whole, length):
                    for i in range(dim):
                        o[i] += s[key] * v[key, i]


class CompiledBetween:
    """`lean_ops.Between` by the loops above. What one call gives lies where the next of its kind will write.

    Args:
        places: of the step's tokens.
    """

    def __init__(self, places: Places) -> None:
        self._cos, self._sin = places.cos.contiguous().numpy(), places.sin.contiguous().numpy()
        self._queries, self._rotated = places.queries, places.queries + places.keys
        self._after_norm: _Buffer | None = None
        self._after_gate: _Buffer | None = None

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """x [n, hidden] after a norm."""
        found = self._after_norm = self._after_norm or _Buffer(x.shape)
        normed(x.numpy(), *_norm(norm), found.array)
        return found.tensor

    def added(self, x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """x + more [n, hidden], in the memory of x, and that after a norm."""
        found = self._after_norm = self._after_norm or _Buffer(x.shape)
        added_and_normed(x.numpy(), more.numpy(), *_norm(norm), found.array)
        return x, found.tensor

    def turned(self, layer: Layer, made: Tensor) -> None:
        """Norms and rotary positions of the queries and keys in made [n, queries + keys + values, dim], in place."""
        array = made.numpy()
        if self._cos.shape != self._sin.shape or self._cos.shape != (made.shape[0], made.shape[2]):
            raise ValueError(f"rotary positions of {self._cos.shape[1]} numbers are not for heads of {made.shape[2]}")
        if layer.queries is not None and layer.keys is not None:
            heads_normed(array, 0, self._queries, *_norm(layer.queries))
            heads_normed(array, self._queries, self._rotated, *_norm(layer.keys))
        heads_turned(array, self._rotated, self._cos, self._sin)

    def gated(self, layer: Layer, both: Tensor) -> Tensor:
        """silu(gate) * up [n, inner] of gate and up side by side [n, 2 inner]."""
        if self._after_gate is None:
            rows, width = both.shape
            self._after_gate = _Buffer((rows, width // 2))
        found = self._after_gate
        gated(both.numpy(), found.array)
        return found.tensor


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
        self._found: _Buffer | None = None

    def __call__(self, made: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """made [size, queries + keys + values, dim] -> [size, queries x dim], where the next layer's will be; arenas
        [rows, key heads, places, dim]."""
        key_heads = keys.shape[1]
        if made.shape[1] != self._queries + 2 * key_heads or keys.shape != values.shape:
            raise ValueError(f"{made.shape[1]} heads are not {self._queries} of queries and twice {key_heads}")
        if self._found is None:
            self._found = _Buffer((self._size, self._queries * made.shape[2]))
        arrays = made.numpy(), keys.numpy(), values.numpy()
        attended(*arrays, self._start, self._positions, scale, self._found.array)
        return self._found.tensor


class _Buffer:
    """Zeros that both libraries see.

    Args:
        shape: of them.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.tensor = torch.zeros(*shape, dtype=torch.float32, device="cpu")  # whatever the default is now
        self.array: Floats = self.tensor.numpy()


def _norm(norm: nn.Module) -> tuple[Floats, float]:
    weight, eps = norm._parameters["weight"], eps_of(norm)
    assert weight is not None
    assert eps is not None
    return weight.detach().numpy(), eps
