"""When Python looks for garbage."""

from __future__ import annotations

import gc
from types import TracebackType

_kept = False


def keep_modules() -> None:
    """Set aside what there is, for good: mostly what torch and Transformers have made when they were imported. It is a
    million objects, through which every collection would go again."""
    global _kept
    _kept = True
    gc.freeze()


class GarbageCollection:
    """Python's garbage collection at steps that are the same on all ranks: each rank's pause stops all the others.

    with GarbageCollection() as garbage:
        for step in ...:
            garbage.step(step)

    What `keep_modules` has set aside stays so: to go through it takes a third of a second.

    Args:
        every: steps between collections.
    """

    def __init__(self, every: int = 50) -> None:
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        if not _kept:
            gc.freeze()  # modules and model live as long as the run, and need not be gone through each time
        return self

    def step(self, step: int) -> None:
        """Collect, if it is time."""
        if step % self._every == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _kept:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
