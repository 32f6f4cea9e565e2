"""How long the longest tests go on: a little in `make test`, to their promised size in `make soak`."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")


def soaked(short: Size, promised: Size) -> Size:
    """The size of a test that repeats itself: kills, rounds, rows."""
    return promised if os.environ.get("LUTHIER_SOAK") else short
