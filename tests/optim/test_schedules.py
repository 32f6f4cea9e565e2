"""Schedules against Transformers' own, and at their ends."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter
from transformers import get_scheduler

from luthier.config.schedules import ScheduleConfig
from luthier.optim import schedules


def config(**fields: object) -> ScheduleConfig:
    return TypeAdapter(ScheduleConfig).validate_python(fields)


def transformers_factors(name: str, total: int, warmup: int, **options: object) -> list[float]:
    """The learning rates that a Transformers schedule gives after each of `total` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup + 1, total, scheduler_specific_kwargs=options)
    factors = []
    for _ in range(total):
        optimizer.step()
        schedule.step()
        factors.append(schedule.get_last_lr()[0])
    return factors


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("fields", "name", "options"),
    [
        ({"name": "constant"}, "constant_with_warmup", {}),
        ({"name": "linear"}, "linear", {}),
        ({"name": "cosine"}, "cosine", {}),
        ({"name": "cosine", "minimum": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"name": "wsd", "decay": 10}, "warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear"}),
        (
            {"name": "wsd", "decay": 0.25, "shape": "cosine"},
            "warmup_stable_decay",
            {"num_decay_steps": 10, "decay_type": "cosine"},
        ),
    ],
)
def test_transformers_has_the_same_curve_one_step_later(fields, name, options, warmup) -> None:
    ours = [schedules.factor(step, 40, config(**fields, warmup=warmup)) for step in range(40)]
    assert ours == pytest.approx(transformers_factors(name, 40, warmup, **options), abs=1e-12)


ALL = [
    {"name": "linear", "minimum": 0.1},
    {"name": "cosine", "minimum": 0.1},
    {"name": "wsd", "minimum": 0.1, "decay": 0.2},
    {"name": "wsd", "minimum": 0.1, "decay": 5, "shape": "sqrt"},
    {"name": "wsd", "minimum": 0.1, "decay": 200, "shape": "cosine"},
]


@pytest.mark.parametrize("fields", ALL)
@pytest.mark.parametrize("warmup", [0, 1, 0.03, 10])
def test_starts_above_zero_peaks_at_one_and_ends_at_the_minimum(fields, warmup) -> None:
    values = [schedules.factor(step, 100, config(**fields, warmup=warmup)) for step in range(100)]
    assert values[0] > 0
    assert max(values) == values[schedules.in_steps(warmup, 100)] == 1.0
    assert values[-1] == pytest.approx(0.1, abs=1e-12)
    assert schedules.factor(1000, 100, config(**fields, warmup=warmup)) == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize("fields", [{"name": "constant"}, *ALL])
def test_a_run_of_one_step_is_at_the_peak(fields) -> None:
    assert schedules.factor(0, 1, config(**fields)) == 1.0


def test_piecewise_with_warmup() -> None:
    points = config(name="piecewise", points=[[0, 1.0], [10, 0.5]], warmup=1)
    assert [schedules.factor(step, 20, points) for step in (0, 5, 10, 19)] == [0.5, 0.75, 0.5, 0.5]


def test_a_warmup_longer_than_the_run_never_arrives() -> None:
    values = [schedules.factor(step, 5, config(name="cosine", warmup=9)) for step in range(5)]
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
