"""Which layers go to which stage: the slowest stage sets the pace, so the cut makes it as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage runs: layers `start` to `stop` (exclusive), and what is before or after all of them.

    Attributes:
        index: of the stage.
        stages: how many there are in all.
    """

    index: int
    stages: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


def balance(layers: Sequence[float], after: float, stages: int) -> tuple[Part, ...]:
    """Deal layers to stages, in order and at least one to each, so that the most expensive stage costs least.

    Args:
        layers: cost of each.
        after: cost of what the last stage does besides (the head).
        stages: how many; no more than there are layers.

    >>> [(part.start, part.stop) for part in balance([1, 1, 1, 1, 1, 1], after=2, stages=2)]
    [(0, 4), (4, 6)]
    """
    count = len(layers)
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer)
    # best[n] = (cost of the dearest stage, sum of squares to break ties evenly, bounds) of the first n layers
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        last = stage == stages
        ends = [count] if last else range(stage, count - (stages - stage) + 1)
        nxt: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for start, (worst, squares, bounds) in best.items():
                if start < end:
                    own = sums[end] - sums[start] + (after if last else 0.0)
                    options.append((max(worst, own), squares + own * own, (*bounds, end)))
            if options:
                nxt[end] = min(options)
        best = nxt
    bounds = best[count][2]
    return tuple(Part(i, stages, bounds[i], bounds[i + 1]) for i in range(stages))
