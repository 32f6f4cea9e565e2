"""What a recipe calls after each step and each measurement, and the log of a run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from luthier.config import RunConfig
from luthier.data.state import StepBatch
from luthier.report.flops import count_flops
from luthier.report.metrics import known
from luthier.report.progress import TERMINAL, amount, duration
from luthier.report.sinks import JsonlSink, Sink, open_tracker
from luthier.report.throughput import peak_flops, peak_memory

# Where there is no terminal, a line now and then.
_PLAIN_SECONDS = 10.0
# How much of an older pace counts for the time left.
_PACE_MEMORY = 0.9

_TOLD = ("perplexity", "reward_margin", "reward_accuracy")
"""What is said of a measurement beside its loss."""

logger = logging.getLogger(__name__)


class Counters(Protocol):
    """What a run has done so far (engine's Counters)."""

    step: int
    rows: int
    tokens: int
    trained_tokens: int
    skipped_steps: int


class State(Protocol):
    """What is trained (engine's TrainState)."""

    model: Any
    device: torch.device

    outline: Any
    mesh: Any

    @property
    def is_main(self) -> bool: ...
    @property
    def counters(self) -> Any: ...


class Measurement(Protocol):
    """The result of an evaluation (engine's Evaluation)."""

    @property
    def loss(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Reporter:
    """Writes metrics.jsonl and the trackers, and draws the progress line. Used as a context manager.

    Args:
        directory: of the run. Rows of metrics.jsonl after the step that the run goes on from are cut off.
        config: of the run.
        state: what is trained; its counters say where the run goes on.
        total: steps of the whole run.

    Raises:
        UserError: a tracker's package is not installed.
    """

    def __init__(self, directory: Path, config: RunConfig, state: State, total: int) -> None:
        self._every = config.report.every
        self._total = total
        self._device = state.device
        self._flops = count_flops(state.outline)
        self._parts = state.mesh.layout.data_ranks if state.mesh is not None else 1
        ranks = state.mesh.layout.ranks if state.mesh is not None else 1
        self._peak = ranks * peak_flops(state.device, _dtype(state.outline)) if state.is_main else 1.0
        self._compiles, self._graphs = config.train.compile, 0
        values = config.model_dump(mode="json")
        self._main = state.is_main
        self._sinks: list[Sink] = []
        if self._main:
            self._sinks.append(JsonlSink(directory / "metrics.jsonl", step=state.counters.step))
        for name in config.report.trackers if self._main else ():
            self._sinks.append(open_tracker(name, directory, config.report.project, values, step=state.counters.step))
        self._first = state.counters.step + 1
        self._pace: float | None = None
        self._spoken = float("-inf")
        self._begin = time.perf_counter()

    def __enter__(self) -> Reporter:
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TERMINAL.clear()
        for sink in self._sinks:
            sink.close()

    def step(self, counters: Counters, batch: StepBatch, measured: Mapping[str, float]) -> dict[str, float]:
        """After a step.

        Args:
            counters: this step included.
            batch: what the step was taken with.
            measured: loss, gradient_norm, learning_rate.

        Returns:
            the row, as it is written.
        """
        now = time.perf_counter()
        seconds, self._begin = now - self._begin, now
        flops = sum(
            self._flops.step(microbatch.cu_seqlens.diff().tolist(), microbatch.trained_tokens)
            for microbatch in batch.microbatches
        )
        flops *= self._parts  # global batches are dealt out evenly
        row: dict[str, float] = {
            "epoch": batch.epoch,
            **measured,
            "rows": counters.rows,
            "tokens": counters.tokens,
            "trained_tokens": counters.trained_tokens,
            "skipped_steps": counters.skipped_steps,
            "step_seconds": seconds,
            "tokens_per_second": batch.tokens / seconds,
            "flops_per_second": flops / seconds,
            "peak_share": flops / seconds / self._peak,
            "memory_bytes": peak_memory(self._device),
        }
        if self._compiles:
            row["compiled_graphs"] = self._compiled(counters.step)
        assert all(known(name) for name in row), f"not in the table of metrics: {[n for n in row if not known(n)]}"
        edge = counters.step in (self._first, self._total)
        if edge or counters.step % self._every == 0:
            self._write(counters.step, row)
        # The first step of a process warms caches and kernels up: it says little about the others.
        if counters.step > self._first or self._pace is None:
            old = self._pace if counters.step > self._first + 1 else None
            self._pace = seconds if old is None else _PACE_MEMORY * old + (1 - _PACE_MEMORY) * seconds
        if self._main:
            self._show(counters.step, row, edge)
        return row

    def _compiled(self, step: int) -> int:
        """Graphs that torch.compile has made so far; those made after the first step are told."""
        before, self._graphs = self._graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if self._main and step > self._first and self._graphs > before:
            logger.info(
                "step %d: torch.compile made %d more graphs, %d in all", step, self._graphs - before, self._graphs
            )
        return self._graphs

    def validation(self, step: int, result: Measurement) -> None:
        """After a measurement of the validation loss; the time it took is not the next step's."""
        row = {f"validation_{name}": value for name, value in result.metrics.items()}
        assert all(known(name) for name in row), f"not in the table of metrics: {[n for n in row if not known(n)]}"
        self._write(step, row)
        others = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in result.metrics.items() if name in _TOLD]
        logger.info("%s", ", ".join([f"step {step}: validation loss {result.loss:.4f}", *others]))
        self._begin = time.perf_counter()

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, row)

    def _show(self, step: int, row: Mapping[str, float], edge: bool) -> None:
        left = (self._total - step) * (self._pace or 0.0)
        line = "  ".join(
            [
                f"step {step}/{self._total}",
                f"loss {row['loss']:.4f}" if "loss" in row else "",
                f"{row['tokens_per_second']:,.0f} tokens/s",
                f"{row['peak_share']:.0%} of peak",
                amount(row["memory_bytes"], "B"),
                f"{duration(left)} left",
            ]
        )
        if TERMINAL.interactive:
            TERMINAL.draw(line, force=edge)
        elif edge or time.perf_counter() - self._spoken > _PLAIN_SECONDS:
            self._spoken = time.perf_counter()
            logger.info("%s", line)


class _ConsoleHandler(logging.Handler):
    """Log records on standard error, above the progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            TERMINAL.print(self.format(record))
        except Exception:
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Log records at the end of a file. A run whose log cannot be written goes on, and says so once."""

    _told = False

    def __init__(self, path: Path) -> None:
        # names of files may hold bytes that are not UTF-8
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            TERMINAL.print(f"{self.baseFilename} cannot be written ({error.strerror}); the run goes on without it")

    def close(self) -> None:
        with suppress(OSError):  # what is not written yet is written once more
            super().close()


@contextmanager
def run_log(path: Path | None = None) -> Iterator[None]:
    """Send what Luthier logs to standard error and, with times, to the end of a file.

    Args:
        path: log.txt of a run directory that exists; None for standard error alone.
    """
    top = logging.getLogger("luthier")
    console = _ConsoleHandler()
    console.setFormatter(logging.Formatter("%(message)s"))
    handlers: list[logging.Handler] = [console]
    if path is not None:
        file = _FileHandler(path)
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        file.setFormatter(formatter)
        handlers.append(file)
    level = top.level
    top.setLevel(logging.INFO)
    for handler in handlers:
        top.addHandler(handler)
    try:
        yield
    finally:
        top.setLevel(level)
        for handler in handlers:
            top.removeHandler(handler)
            handler.close()


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = model.dtype
    return dtype
