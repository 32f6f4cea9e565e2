"""The benchmark's tables, as Markdown, out of what the cells measured."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

Result = dict[str, Any]
MODE_NAMES = {"default": "as it comes", "packed": "packed", "tuned": "packed and tuned"}


@dataclass(frozen=True)
class Bound:
    """What must hold: Luthier's tokens per CPU-second over TRL's are at least `limit`, or its peak memory at most."""

    workload: str
    method: str
    precision: str
    mode: str
    limit: float
    memory: bool = False


@dataclass(frozen=True)
class Side:
    """Cells of one kind, put together."""

    cells: Sequence[Result]

    @property
    def rate(self) -> float:
        """Tokens per CPU-second over all of them."""
        return float(sum(cell["tokens"] for cell in self.cells) / sum(cell["cpu_seconds"] for cell in self.cells))

    @property
    def spread(self) -> float:
        """Half of the range of their rates over their middle; 0 for a single cell."""
        rates = [cell["tokens_per_cpu_second"] for cell in self.cells]
        return float((max(rates) - min(rates)) / 2 / statistics.median(rates))

    @property
    def peak(self) -> float:
        return float(max(cell["peak_bytes"] for cell in self.cells))

    @property
    def above_baseline(self) -> float:
        return float(max(cell["peak_bytes"] - cell["baseline_bytes"] for cell in self.cells))

    @property
    def system(self) -> float:
        """Share of system time."""
        return float(
            sum(cell["system_seconds"] for cell in self.cells) / sum(cell["cpu_seconds"] for cell in self.cells)
        )

    @property
    def loss(self) -> float:
        return statistics.fmean(loss for cell in self.cells for loss in cell["losses"])

    def share(self, gemm: dict[str, float]) -> float:
        """Useful operations a CPU-second over the machine's own rate of matrix products."""
        return float(self.rate * self.cells[0]["useful_flops_per_token"] / gemm[self.cells[0]["precision"]])


def _pick(results: Sequence[Result], side: str, workload: str, method: str, precision: str, mode: str | None) -> Side:
    key = {"side": side, "workload": workload, "method": method, "precision": precision}
    if mode is not None:
        key["mode"] = mode
    return Side([result for result in results if all(result[name] == value for name, value in key.items())])


def machine(args: argparse.Namespace) -> str:
    """What this was measured on, as a Markdown list."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in cpu.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in cpu.splitlines() if line.startswith("flags")), [])
    special = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    command = " ".join(["python", *(os.path.relpath(word) if os.path.isfile(word) else word for word in sys.argv)])
    return "\n".join((
        f"- {names[0] if names else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"{', '.join(special) or 'no AVX2'}",
        f"- Python {platform.python_version()}, {packages}",
        f"- {args.threads} thread(s) a process, {args.steps} steps after {args.warmup} of warm-up, "
        f"about {args.budget:,} tokens a step",
        f"- `{command}`, {datetime.date.today().isoformat()}",
    ))  # fmt: skip


def rates(results: Sequence[Result], gemm: dict[str, float]) -> str:
    """One row for each cell of TRL's, with Luthier's beside it."""
    lines = [
        "| model | method | precision | TRL | Luthier tok/CPU-s | TRL tok/CPU-s | **ratio** | Luthier MB | TRL MB | "
        "**memory ratio** | above imports | share of GEMM rate, Luthier / TRL | system time, Luthier / TRL | "
        "loss, Luthier / TRL |",
        "|---|---|---|---|" + "---:|" * 10,
    ]
    kinds = dict.fromkeys((r["workload"], r["method"], r["precision"], r["mode"]) for r in results)
    for workload, method, precision, mode in kinds:
        ours = _pick(results, "luthier", workload, method, precision, None)
        theirs = _pick(results, "trl", workload, method, precision, mode)
        if not ours.cells or not theirs.cells:
            continue
        spread = f" ± {ours.spread:.0%}" if len(ours.cells) > 1 else ""
        lines.append(
            f"| {workload} | {method} | {precision} | {MODE_NAMES[mode]} | {ours.rate:,.0f}{spread} | "
            f"{theirs.rate:,.1f} | **{ours.rate / theirs.rate:.1f}x** | {ours.peak / 1e6:,.0f} | "
            f"{theirs.peak / 1e6:,.0f} | **{ours.peak / theirs.peak:.2f}x** | "
            f"{ours.above_baseline / theirs.above_baseline:.2f}x | "
            f"{ours.share(gemm):.0%} / {theirs.share(gemm):.1%} | {ours.system:.0%} / {theirs.system:.0%} | "
            f"{ours.loss:.3f} / {theirs.loss:.3f} |"
        )
    return "\n".join(lines)


def verdicts(results: Sequence[Result], bounds: Sequence[Bound], loading: Sequence[Result]) -> str:
    """One row for each bound that was measured."""
    lines = ["| bound | asked | measured | |", "|---|---:|---:|---|"]

    def row(name: str, asked: str, measured: float, holds: bool) -> None:
        lines.append(f"| {name} | {asked} | {measured:.2f}x | {'holds' if holds else '**missed**'} |")

    for bound in bounds:
        key = (bound.workload, bound.method, bound.precision)
        ours, theirs = _pick(results, "luthier", *key, None), _pick(results, "trl", *key, bound.mode)
        if not ours.cells or not theirs.cells:
            continue
        name = f"{' '.join(key)} against TRL {MODE_NAMES[bound.mode]}"
        if bound.memory:
            ratio = ours.peak / theirs.peak
            row(f"{name}: peak memory", f"<= {bound.limit}x", ratio, ratio <= bound.limit)
        else:
            ratio = ours.rate / theirs.rate
            row(f"{name}: tokens per CPU-second", f">= {bound.limit}x", ratio, ratio >= bound.limit)
    for measured in loading:
        holds = round(measured["ratio"], 2) <= measured["limit"]  # pages of memory: equal to a percent is equal
        row(measured["name"], f"<= {measured['limit']}x", measured["ratio"], holds)
    return "\n".join(lines)


def render(
    results: Sequence[Result],
    bounds: Sequence[Bound],
    gemm: dict[str, float],
    loading: Sequence[Result],
    args: argparse.Namespace,
) -> str:
    """The whole report.

    Args:
        results: what the cells printed.
        bounds: what must hold.
        gemm: operations per CPU-second of the best matrix product, by precision.
        loading: name, limit and ratio of each measurement of loading.
        args: of the command, for the description.
    """
    best = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in gemm.items())
    return f"""# Luthier beside TRL

{machine(args)}
- matrix products alone, best of several large shapes, a CPU-second: {best}

Tokens are those of the rows, padding left out; CPU-seconds are user and system time over the measured steps; memory is
the largest resident size of the whole process. README.md in this directory says what each side is given.

{rates(results, gemm)}

{verdicts(results, bounds, loading)}
"""
