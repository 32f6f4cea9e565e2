"""Operations of a model, counted: what `flops.py` finds, and sums over documents. Imports no torch.

An n x k by k x m product is 2 n k m operations; everything else (norms, activations, softmax) is left out, as is usual,
and so is recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionFlops:
    """One layer's products of queries with keys and of probabilities with values.

    Attributes:
        pair: operations of the forward pass for one query and one key that it sees.
        window: how many keys a query sees at most; None for all before it.
        backward: whether the backward pass goes through. It counts as twice the forward's, though queries, keys or
            values of the lowest layer that trains may need none.
    """

    pair: int
    window: int | None
    backward: bool

    def forward(self, length: int) -> int:
        """Operations for one document of this many tokens, each seeing itself and those before."""
        reach = min(length, self.window or length)
        return self.pair * (reach * (reach + 1) // 2 + (length - reach) * reach)


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """Products of one layer, for one token.

    Attributes:
        forward: of its linear modules and of the experts that a token visits.
        backward: of the same; less where weights are frozen, least below the first adapter.
        attention: of queries with keys and of probabilities with values; None in a layer without attention.
    """

    forward: int
    backward: int
    attention: AttentionFlops | None = None


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of one model as it is trained.

    Attributes:
        layers: of every layer, in order.
        head_forward: for one position that the loss counts; positions of weight 0 never reach the head.
        head_backward: for one such position.
    """

    layers: tuple[LayerFlops, ...]
    head_forward: int
    head_backward: int

    @property
    def token_forward(self) -> int:
        """Of all layers for one token, attention's own products aside."""
        return sum(layer.forward for layer in self.layers)

    @property
    def token_backward(self) -> int:
        """The same of the backward pass."""
        return sum(layer.backward for layer in self.layers)

    @property
    def attention(self) -> tuple[AttentionFlops, ...]:
        """Of each layer that has attention."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    def forward(self, lengths: Iterable[int], trained: int) -> int:
        """Operations of a forward pass over documents of these lengths with `trained` positions in the loss."""
        lengths = list(lengths)
        seen = sum(layer.forward(length) for layer in self.attention for length in lengths)
        return self.token_forward * sum(lengths) + seen + self.head_forward * trained

    def backward(self, lengths: Iterable[int], trained: int) -> int:
        """Operations of the backward pass that follows."""
        lengths = list(lengths)
        seen = sum(2 * layer.forward(length) for layer in self.attention if layer.backward for length in lengths)
        return self.token_backward * sum(lengths) + seen + self.head_backward * trained

    def step(self, lengths: Sequence[int], trained: int) -> int:
        """Forward and backward together."""
        return self.forward(lengths, trained) + self.backward(lengths, trained)
