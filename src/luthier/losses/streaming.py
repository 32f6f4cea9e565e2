"""One streaming pass over the vocabulary: log-probabilities and gradients without a logits buffer.

The head and the softmax together are attention with queries h, and W as keys and values: tile by tile, exp(z) is summed
and multiplied by W again while the tile is still in the cache. With Z_r = sum over v != y of exp(z_v), e_y = exp(z_y):

    log p(y) = -log(1 + Z_r / e_y)            d(-log p) / dz_y = -Z_r / (Z_r + e_y)         (never p - 1)

Leaving the target out of the sum is what keeps the gradient of confident tokens: p - 1 cancels, Z_r does not.
The idea of an online softmax is that of Milakov and Gimelshein (2018), https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_CALM = 30.0
"""Scores whose maximum is within +-30 need no shift: exp of them is far from the ends of the range of fp32 and bf16."""
_SMALLEST, _LARGEST = 1e-20, 1e30
"""A sum of exponentials within these has lost nothing; outside, the pass is run again with the true maximum."""


@dataclass(frozen=True, slots=True)
class LinearHead:
    """A head whose logits are soft_cap * tanh(scale * (h W^T + b) / soft_cap), or without the cap scale * (h W^T + b).

    Attributes:
        weight: [vocabulary, hidden].
        bias: [vocabulary] or None.
        scale: a factor on the logits (cohere's `logit_scale`, 1 / granite's `logits_scaling`).
        soft_cap: gemma2's `final_logit_softcapping`, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the logits of one tile of the vocabulary, [n, tile] in the dtype of hidden, into `out`."""
        if bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden, weight.t(), out=out)
        self.transform_(out)

    def transform_(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and cap in place."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.soft_cap is not None:
            raw.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return raw

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Derivative of the cap at these logits, None where there is no cap; the scale is not in it."""
        if self.soft_cap is None:
            return None
        return 1 - (logits / self.soft_cap).square()


@dataclass(slots=True)
class Gradients:
    """What the pass fills in; None = not wanted.

    Attributes:
        hidden: [n, hidden], in any dtype.
        weight: [vocabulary, hidden], in the dtype of the weight.
        bias: [vocabulary].
        add: whether weight and bias hold the sum of earlier chunks; if not, they are overwritten and may be empty.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    add: bool


class _Tiles:
    """Tiles of the vocabulary, and which rows have their target in which tile."""

    def __init__(self, targets: torch.Tensor, vocabulary: int, width: int) -> None:
        self.spans = [(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
        ordered, self.rows = torch.sort(targets)
        edges = torch.tensor([start for start, _ in self.spans] + [vocabulary], device=targets.device)
        self.edges = torch.searchsorted(ordered, edges).tolist()
        self.ordered = ordered

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(columns of the vocabulary, rows whose target is among them, its place in the tile)."""
        for number, (start, stop) in enumerate(self.spans):
            own = slice(self.edges[number], self.edges[number + 1])
            yield slice(start, stop), self.rows[own], self.ordered[own] - start


def stream(
    hidden: torch.Tensor,
    head: LinearHead,
    targets: torch.Tensor,
    coefficients: torch.Tensor,
    gradients: Gradients | None,
    tile: int,
) -> torch.Tensor:
    """Log-probabilities of the targets of a chunk of positions, and the gradients of the sum of coefficient * -log p.

    Args:
        hidden: [n, hidden], n > 0.
        head: the head, in the dtype of hidden.
        targets: int64 [n].
        coefficients: [n], any sign.
        gradients: buffers to fill, or None.
        tile: columns of the vocabulary at a time.

    Returns:
        [n] in fp32, or float64 for float64.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    own_weight = head.weight[targets].to(wide)
    target_logits = torch.linalg.vecdot(hidden.to(wide), own_weight)
    if head.bias is not None:
        target_logits += head.bias[targets].to(wide)
    head.transform_(target_logits)
    tiles = _Tiles(targets, head.weight.shape[0], tile)
    state = _Sums(hidden, head, tiles, target_logits, gradients, wide)
    state.run(state.calm_shift())
    if not state.in_range():
        state.run(state.true_maximum())
    if gradients is not None:
        state.finish(gradients, own_weight, targets, coefficients.to(wide))
    return state.log_probabilities()


class _Sums:
    """The sums of one chunk: the rest of the softmax, and the same weighted by the rows of W or kept for dW."""

    def __init__(
        self,
        hidden: torch.Tensor,
        head: LinearHead,
        tiles: _Tiles,
        target_logits: torch.Tensor,
        gradients: Gradients | None,
        wide: torch.dtype,
    ) -> None:
        self.hidden, self.head, self.tiles, self.wide = hidden, head, tiles, wide
        self.target_logits = target_logits
        self.want_hidden = gradients is not None and gradients.hidden is not None
        self.keep = gradients is not None and (gradients.weight is not None or gradients.bias is not None)
        width = max(stop - start for start, stop in tiles.spans)
        self.scores = hidden.new_empty(len(hidden) * width)
        self.product = torch.empty_like(hidden) if self.want_hidden else None
        self.shift: torch.Tensor | None = None
        self.rest = torch.empty(0)
        self.weighted = torch.empty(0)
        self.kept: list[torch.Tensor] = []

    def _logits(self, columns: slice) -> torch.Tensor:
        """[n, tile] logits of one tile; a buffer of its own where the tile is kept."""
        width = columns.stop - columns.start
        count = len(self.hidden)
        if self.keep:
            scores = self.hidden.new_empty(count, width)
        else:
            scores = self.scores[: count * width].view(count, width)
        bias = None if self.head.bias is None else self.head.bias[columns]
        self.head.logits(self.hidden, self.head.weight[columns], bias, scores)
        return scores

    def calm_shift(self) -> torch.Tensor | None:
        """[n, 1] shift guessed from a few columns; None where none is needed, which saves a pass over each tile."""
        start, stop = self.tiles.spans[0]
        few = slice(start, min(stop, start + 64))
        guess = torch.maximum(self._logits(few).amax(1).to(self.wide), self.target_logits)
        if bool((guess.abs() < _CALM).all()):
            return None
        return self._rounded(guess)

    def true_maximum(self) -> torch.Tensor:
        """[n, 1] largest logit of each row: costs a product more, needed for scores of a very wide range only."""
        largest = self.target_logits
        for columns, _, _ in self.tiles:
            largest = torch.maximum(largest, self._logits(columns).amax(1).to(self.wide))
        return self._rounded(largest)

    def _rounded(self, shift: torch.Tensor) -> torch.Tensor:
        """A shift that the dtype of the scores holds exactly, so that both places subtract the same number."""
        return shift.to(self.hidden.dtype)[:, None]

    def run(self, shift: torch.Tensor | None) -> None:
        """The pass."""
        self.shift = shift
        self.rest = torch.zeros(len(self.hidden), 1, dtype=self.wide, device=self.hidden.device)
        self.kept = []
        if self.want_hidden:
            self.weighted = torch.zeros(self.hidden.shape, dtype=self.wide, device=self.hidden.device)
        for columns, rows, places in self.tiles:
            scores = self._logits(columns)
            slope = self.head.slope(scores)
            if shift is not None:
                scores.sub_(shift)
            scores[rows, places] = -torch.inf  # the target is left out of the sum
            scores.exp_()
            self.rest += _row_sums(scores, self.wide)
            if slope is not None:
                scores.mul_(slope)
            if self.product is not None:
                torch.mm(scores, self.head.weight[columns], out=self.product)
                self.weighted += self.product
            if self.keep:
                self.kept.append(scores)

    @property
    def _target(self) -> torch.Tensor:
        """[n, 1] logit of the target, shifted as the scores are."""
        column = self.target_logits[:, None]
        return column if self.shift is None else column - self.shift.to(self.wide)

    def in_range(self) -> bool:
        """Whether the shift was good enough for every row: no overflow, nor all below the smallest number."""
        total = self.rest + self._target.exp()
        return bool(((total > _SMALLEST) & (total < _LARGEST)).all())

    def log_probabilities(self) -> torch.Tensor:
        """[n]: -log(1 + rest / e_y), without the cancellation of z_y - log(sum)."""
        excess = self.rest.log() - self._target
        return -torch.logaddexp(torch.zeros_like(excess), excess)[:, 0]

    def finish(
        self, gradients: Gradients, own_weight: torch.Tensor, targets: torch.Tensor, coefficients: torch.Tensor
    ) -> None:
        """Turn the sums into gradients; own_weight [n, hidden] are the rows of W of the targets."""
        factor = coefficients[:, None] * self.head.scale / (self.rest + self._target.exp())
        at_target = self.rest
        slope = self.head.slope(self.target_logits)
        if slope is not None:
            at_target = at_target * slope[:, None]
        if gradients.hidden is not None:
            gradients.hidden.copy_(self.weighted.sub_(at_target * own_weight).mul_(factor))
        if not self.keep:
            return
        scaled = (self.hidden * factor).to(self.hidden.dtype)
        for (columns, _, _), scores in zip(self.tiles, self.kept, strict=True):
            if gradients.weight is not None:
                if gradients.add:
                    gradients.weight[columns].addmm_(scores.t(), scaled)
                else:
                    torch.mm(scores.t(), scaled, out=gradients.weight[columns])
            if gradients.bias is not None:
                sums = torch.mv(scores.t(), factor[:, 0].to(scores.dtype))
                gradients.bias[columns] = gradients.bias[columns] + sums if gradients.add else sums
        self.kept = []
        unique, place = torch.unique(targets, return_inverse=True)
        if gradients.weight is not None:  # summed in wide first: frequent tokens would lose bits one addition at a time
            rows = torch.zeros(len(unique), self.hidden.shape[1], dtype=self.wide, device=self.hidden.device)
            rows.index_add_(0, place, self.hidden.to(self.wide) * (at_target * factor))
            gradients.weight[unique] = (gradients.weight[unique].to(self.wide) - rows).to(gradients.weight.dtype)
        if gradients.bias is not None:
            flat = torch.zeros(len(unique), dtype=self.wide, device=self.hidden.device)
            flat.index_add_(0, place, (at_target * factor)[:, 0])
            gradients.bias[unique] = (gradients.bias[unique].to(self.wide) - flat).to(gradients.bias.dtype)


_PARTS = 8
"""Pieces of a row of scores that are summed in the low precision's own fast kernel, then in fp32."""


def _row_sums(scores: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """[n, 1] sums in `wide`.

    A sum of bf16 is accumulated in fp32 and rounded once at its end; asking for fp32 instead takes a path four times
    slower. Eight pieces a tile make that rounding much smaller than the one that the scores already have.
    """
    count, width = scores.shape
    if scores.dtype == wide or width % _PARTS:
        return scores.sum(1, keepdim=True, dtype=wide)
    return scores.view(count, _PARTS, width // _PARTS).sum(2).sum(1, keepdim=True, dtype=wide)
