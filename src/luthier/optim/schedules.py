"""Learning-rate schedules: plain functions of the step.

Steps count from 0: the factor of step 0 multiplies the learning rate of the first update. During a warm-up of W steps
the factor is (s + 1) / (W + 1), so the first update already moves and step W is the first at the peak; the last of N
steps, N - 1, is at the minimum. Transformers' schedules are the same curves one step later: their first step is at 0.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import assert_never

from luthier.config.schedules import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    PiecewiseSchedule,
    ScheduleConfig,
    WarmupStableDecaySchedule,
)


def factor(step: int, total: int, config: ScheduleConfig) -> float:
    """What the learning rate is multiplied by at a step.

    Args:
        step: 0 to total - 1; later steps keep the last value.
        total: steps of the whole run.
        config: which schedule.

    >>> [round(factor(s, 5, LinearSchedule(name="linear")), 3) for s in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    >>> [round(factor(s, 5, LinearSchedule(name="linear", warmup=2)), 3) for s in range(5)]
    [0.333, 0.667, 1.0, 0.5, 0.0]
    """
    warmup = in_steps(config.warmup, total)
    if step < warmup:
        climb = (step + 1) / (warmup + 1)
        return climb * piecewise(step, total, config.points) if isinstance(config, PiecewiseSchedule) else climb
    match config:
        case ConstantSchedule():
            return 1.0
        case LinearSchedule():
            return linear(_progress(step, warmup, total), config.minimum)
        case CosineSchedule():
            return cosine(_progress(step, warmup, total), config.minimum)
        case WarmupStableDecaySchedule():
            start = max(warmup, total - 1 - in_steps(config.decay, total))
            progress = _progress(step, start, total)
            match config.shape:
                case "linear":
                    return linear(progress, config.minimum)
                case "cosine":
                    return cosine(progress, config.minimum)
                case "sqrt":
                    return square_root(progress, config.minimum)
            assert_never(config.shape)
        case PiecewiseSchedule():
            return piecewise(step, total, config.points)
    assert_never(config)


def linear(progress: float, minimum: float = 0.0) -> float:
    """minimum + (1 - minimum) (1 - p).

    >>> linear(0.0), linear(0.5), linear(1.0, minimum=0.1)
    (1.0, 0.5, 0.1)
    """
    return minimum + (1.0 - minimum) * (1.0 - progress)


def cosine(progress: float, minimum: float = 0.0) -> float:
    """minimum + (1 - minimum) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983).

    >>> cosine(0.0), round(cosine(0.5), 9), cosine(1.0, minimum=0.1)
    (1.0, 0.5, 0.1)
    """
    return minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))


def square_root(progress: float, minimum: float = 0.0) -> float:
    """minimum + (1 - minimum) (1 - sqrt(p)) (Haegele et al. 2024, https://arxiv.org/abs/2405.18392).

    >>> square_root(0.0), square_root(0.25), square_root(1.0)
    (1.0, 0.5, 0.0)
    """
    return minimum + (1.0 - minimum) * (1.0 - math.sqrt(progress))


def piecewise(step: int, total: int, points: list[tuple[float, float]]) -> float:
    """Straight lines between points; constant before the first and after the last.

    Steps that are all at most 1 are shares: 0 is the first step of the run and 1 the last.

    >>> [piecewise(s, 100, [(0, 1.0), (10, 0.5), (20, 0.5)]) for s in (0, 5, 10, 99)]
    [1.0, 0.75, 0.5, 0.5]
    >>> piecewise(50, 101, [(0.0, 1.0), (1.0, 0.0)])
    0.5
    """
    if all(position <= 1.0 for position, _ in points):
        points = [(position * (total - 1), value) for position, value in points]
    if step <= points[0][0]:
        return points[0][1]
    for (left, before), (right, after) in pairwise(points):
        if step <= right:
            return before + (after - before) * (step - left) / (right - left)
    return points[-1][1]


def in_steps(amount: float, total: int) -> int:
    """Steps that an amount stands for: below 1 it is a share of all steps. Rounded up.

    >>> in_steps(0.07, 100), in_steps(0.03, 10), in_steps(1, 100), in_steps(0, 100)
    (7, 1, 1, 0)
    """
    # 0.07 x 100 is a little more than 7 in binary.
    return math.ceil(round(amount * total if amount < 1.0 else amount, 9))


def _progress(step: int, start: int, total: int) -> float:
    """0 up to step `start`, 1 from the last step on."""
    span = total - 1 - start
    return max(0.0, min(1.0, (step - start) / span)) if span > 0 else 0.0
