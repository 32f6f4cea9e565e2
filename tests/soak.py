"""How long the longest tests go on: a little in `make test`, to their promised size in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

Size = TypeVar("Size")


def soaked(short: Size, promised: Size) -> Size:
    """The size of a test that repeats itself: kills, rounds, rows."""
    return promised if os.environ.get("LUTHIER_SOAK") else short


def by_turns(models: Sequence[str], layouts: Sequence[dict[str, int]], first: str, second: str) -> list[Any]:
    """Each model on each layout, with the first or the second of two ways in turn; the other of the two in `make soak`.

    Returns:
        parameters of a test: model, layout, whether it is the second way.
    """
    return [
        pytest.param(model, layout, is_second, id=f"{model}-{said(layout)}-{(first, second)[is_second]}", marks=marks)
        for row, model in enumerate(models)
        for column, layout in enumerate(layouts)
        for is_second in (False, True)
        for marks in ([pytest.mark.soak] if (row + column + is_second) % 2 else [],)
    ]


def said(layout: dict[str, int]) -> str:
    """A layout as the name of a test says it."""
    return "-".join(f"{name}{degree}" for name, degree in layout.items())
