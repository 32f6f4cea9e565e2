"""What a lean step does between its matrix products, by PyTorch's operations: on any device, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from luthier.hf.fast_norm import eps_of

FEW_THREADS = 2
"""Up to so many lose less by waiting for compiled loops, which one runs, than by PyTorch's many operations."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer has beside its linear layers.

    Attributes:
        before: norm before attention.
        after: norm before the MLP.
        queries: norm of each head's queries; None where there is none.
        keys: of its keys.
        activation: of the gate.
        scaling: of the attention's scores.
    """

    before: nn.Module
    after: nn.Module
    queries: nn.Module | None
    keys: nn.Module | None
    activation: nn.Module
    scaling: float


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens stand, and what their heads are like.

    Attributes:
        cos: [n, dim], of the rotary positions.
        sin: [n, dim].
        queries: number of heads of queries.
        keys: of keys; there are as many of values.
    """

    cos: Tensor
    sin: Tensor
    queries: int
    keys: int


class Between(Protocol):
    """What a step does between its products, at some places."""

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """x [n, hidden] after a norm."""
        ...

    def added(self, x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """x + more [n, hidden], in the memory of one of them, and that after a norm."""
        ...

    def turned(self, layer: Layer, made: Tensor) -> None:
        """Norms and rotary positions of the queries and keys in made [n, queries + keys + values, dim], in place."""
        ...

    def gated(self, layer: Layer, both: Tensor) -> Tensor:
        """activation(gate) * up [n, inner] of gate and up side by side [n, 2 inner]."""
        ...


class PlainBetween:
    """`Between` by PyTorch's operations.

    Args:
        places: of the step's tokens.
    """

    def __init__(self, places: Places) -> None:
        self._cos, sin = places.cos[:, None], places.sin[:, None]
        half = sin.shape[-1] // 2
        self._signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self._queries, self._rotated = places.queries, places.queries + places.keys

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """weight * round(x / sqrt(mean(x^2) + eps)), computed in fp32 at least, as Llama's norm does."""
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(cast(float, eps_of(norm))).rsqrt_()
        return (wide * inverse).to(x.dtype).mul_(cast(Tensor, norm.weight))

    def added(self, x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        x = more.add_(x)
        return x, self.normed(norm, x)

    def turned(self, layer: Layer, made: Tensor) -> None:
        if layer.queries is not None and layer.keys is not None:
            for norm, first, end in ((layer.queries, 0, self._queries), (layer.keys, self._queries, self._rotated)):
                made[:, first:end] = self.normed(norm, made[:, first:end])
        made[:, : self._rotated] = self._rotary(made[:, : self._rotated])

    def gated(self, layer: Layer, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return cast(Tensor, layer.activation(gate)).mul_(up)

    def _rotary(self, x: Tensor) -> Tensor:
        """x * cos + rotate_half(x) * sin, where the first half of `_signed` is -sin."""
        half = x.shape[-1] // 2
        other = torch.cat((x[..., half:], x[..., :half]), -1).mul_(self._signed)
        return (x * self._cos).add_(other)


def attention_by_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [rows, heads, queries, dim] over keys [rows, heads, places, dim], softmax in fp32.

    Two batched products: on processors with bf16 instructions and no tiles PyTorch's own attention takes five to ten
    times as long for a few queries a head. Keys are copied together first; their transpose would be anyway, slowly.
    """
    rows, heads = query.shape[:2]
    flat = query.flatten(0, 1)
    scores = torch.bmm(flat, keys.contiguous().flatten(0, 1).transpose(1, 2)).unflatten(0, (rows, heads))
    weights = torch.softmax(scores.float().mul_(scale).add_(mask), -1).to(query.dtype)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).unflatten(0, (rows, heads))
