"""CPU seconds and peak memory of this process, step by step: the one stopwatch that both sides use."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def cpu_seconds() -> tuple[float, float]:
    """User and system time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.children_user, times.system + times.children_system


def status(field: str) -> int:
    """A size from /proc/self/status in bytes: VmRSS as it is, VmHWM at its largest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: the benchmark needs Linux")


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    return status("VmHWM")


@dataclass
class Meter:
    """Counts what is done between the end of warm-up and the last step.

    Attributes:
        warmup: steps that are not measured.
        baseline: peak memory after imports, before a model is loaded; bytes.
        peak: peak memory up to the end of the newest step, loading included; bytes.
    """

    warmup: int
    baseline: int = field(default_factory=peak_memory)
    tokens: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    clock: list[tuple[float, float, float]] = field(default_factory=list)

    def start(self) -> None:
        """Call once, just before the first step."""
        self.clock.append((*cpu_seconds(), time.perf_counter()))

    def step(self, *, tokens: int, trained: int, loss: float) -> None:
        """Call at the end of each step.

        Args:
            tokens: tokens of the rows in this step, padding left out.
            trained: predictions that were trained on.
            loss: mean over them.
        """
        self.tokens.append(tokens)
        self.trained.append(trained)
        self.losses.append(loss)
        self.peak = peak_memory()
        self.clock.append((*cpu_seconds(), time.perf_counter()))

    def result(self) -> dict[str, Any]:
        first, last = self.clock[self.warmup], self.clock[-1]
        tokens, user, system = sum(self.tokens[self.warmup :]), last[0] - first[0], last[1] - first[1]
        steps = [round(b[0] + b[1] - a[0] - a[1], 3) for a, b in zip(self.clock, self.clock[1:], strict=False)]
        return {
            "tokens_per_cpu_second": tokens / (user + system),
            "tokens": tokens,
            "trained_tokens": sum(self.trained[self.warmup :]),
            "cpu_seconds": round(user + system, 3),
            "system_seconds": round(system, 3),
            "wall_seconds": round(last[2] - first[2], 3),
            "steps": len(self.tokens) - self.warmup,
            "cpu_seconds_per_step": steps,
            "tokens_per_step": self.tokens,
            "trained_per_step": self.trained,
            "losses": [round(loss, 5) for loss in self.losses],
            "baseline_bytes": self.baseline,
            "peak_bytes": self.peak,
        }

    def report(self, **cell: Any) -> None:
        """Print one JSON line: the cell and what was measured."""
        print(json.dumps({**cell, **self.result()}), flush=True)
