"""Schedules of the learning rate, a model for each."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from luthier.config.base import Fraction, Section


class _ScheduleBase(Section):
    warmup: NonNegativeFloat = 0.0
    """Steps of linear warm-up; below 1 it is a share of all steps."""


class ConstantSchedule(_ScheduleBase):
    name: Literal["constant"] = "constant"


class LinearSchedule(_ScheduleBase):
    name: Literal["linear"]
    minimum: Fraction = 0.0
    """Where the learning rate ends, as a share of its peak."""


class CosineSchedule(_ScheduleBase):
    name: Literal["cosine"]
    minimum: Fraction = 0.0


class WarmupStableDecaySchedule(_ScheduleBase):
    """Warm-up, plateau, decay (Hu et al. 2024, https://arxiv.org/abs/2404.06395)."""

    name: Literal["wsd"]
    decay: PositiveFloat = 0.1
    """Steps of the decay at the end; below 1 it is a share of all steps."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    minimum: Fraction = 0.0


class PiecewiseSchedule(_ScheduleBase):
    """Straight lines between points; constant before the first and after the last."""

    name: Literal["piecewise"]
    points: Annotated[list[tuple[NonNegativeFloat, NonNegativeFloat]], Field(min_length=1)]
    """[step, factor of the learning rate] in rising order; steps at most 1.0 throughout are shares of all steps."""

    @field_validator("points")
    @classmethod
    def _rising(cls, value: list[tuple[float, float]]) -> list[tuple[float, float]]:
        if any(right[0] <= left[0] for left, right in pairwise(value)):
            raise ValueError("the steps of points must rise")
        return value


ScheduleConfig = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WarmupStableDecaySchedule | PiecewiseSchedule,
    Field(discriminator="name"),
]
