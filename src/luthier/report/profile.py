"""torch profiler traces of chosen steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from luthier.config.sections import ProfileConfig

logger = logging.getLogger(__name__)


class Profiler:
    """Traces the steps that a config names, all of them into one file.

    Args:
        config: which steps; None for none.
        directory: gets `steps-START-END.json`, to be opened in https://ui.perfetto.dev or chrome://tracing.
    """

    def __init__(self, config: ProfileConfig | None, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._trace: Any = None
        self._first = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step of this number, which counts from 1."""
        config = self._config
        if config is None or not config.start <= number < config.start + config.steps:
            yield
            return
        if self._trace is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities, record_shapes=True)
            self._trace.start()
            self._first = number
        with torch.profiler.record_function(f"step {number}"):
            yield
        if number == config.start + config.steps - 1:
            self._write(number)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *exception: object) -> None:
        """Write what has been traced of a run that ended, or failed, before the last chosen step."""
        if self._trace is not None:
            self._write(None)

    def _write(self, last: int | None) -> None:
        trace, self._trace = self._trace, None
        trace.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"steps-{self._first}-{last if last is not None else 'end'}.json"
        trace.export_chrome_trace(str(path))
        logger.info("profile written to %s", path)
