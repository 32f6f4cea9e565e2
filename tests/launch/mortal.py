"""`luthier`, whose rank 1 is killed once in the middle of its fifth step: `python -m tests.launch.mortal train ...`."""

from __future__ import annotations

import os
import signal
from typing import Any

from luthier import launch
from luthier.cli.main import entrance

STEPS_BEFORE = 4


def make_mortal() -> None:
    """Gradients are there and summed, weights are not yet changed."""
    from luthier.recipes import loop

    step = loop.optim_step

    def die_or_step(state: Any, **how: Any) -> Any:
        if os.environ["RANK"] == "1" and not launch.restarted() and state.counters.step == STEPS_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(state, **how)

    loop.optim_step = die_or_step


if __name__ == "__main__":
    if "RANK" in os.environ:
        make_mortal()
    entrance()
