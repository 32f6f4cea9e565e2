"""Luthier beside TRL's SFTTrainer with PEFT: tokens per CPU-second, peak memory, share of the machine's own GEMM rate.

Every cell is a process of its own, one after the other, Luthier before each of TRL's, on the same rows and the same
tokens a step. `make bench` runs all of it, for hours; `--quick` and `--only` make it short:

    python benchmarks/run.py --quick --only qwen3 lora bf16 packed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import Bound, render
from workloads import WORKLOADS, default_directory, prepare

HERE = Path(__file__).resolve().parent
METHODS, PRECISIONS, MODES = ("lora", "full"), ("bf16", "fp32"), ("default", "packed", "tuned")
BOUNDS = (
    Bound("qwen3", "lora", "bf16", "packed", 11.0),
    Bound("qwen3", "lora", "bf16", "default", 15.0),
    Bound("qwen3", "lora", "bf16", "tuned", 7.0),
    Bound("qwen3", "full", "bf16", "packed", 9.0),
    Bound("qwen3", "lora", "fp32", "packed", 7.0),
    Bound("smollm2", "lora", "bf16", "packed", 4.5),
    Bound("qwen3", "lora", "bf16", "packed", 0.5, memory=True),
)


@dataclass(frozen=True)
class Cell:
    """One process. `mode` is one of TRL's; Luthier runs as it comes, and is asked once for each."""

    side: str
    workload: str
    method: str
    precision: str
    mode: str

    @property
    def name(self) -> str:
        return " ".join((self.side, self.workload, self.method, self.precision, self.mode))


def plan(only: list[str]) -> list[Cell]:
    """The cells in the order in which they run.

    Args:
        only: words that name a workload, a method, a precision or a mode; each kind that is named is cut to its names.
    """
    kinds = (tuple(WORKLOADS), METHODS, PRECISIONS, MODES)
    unknown = sorted(set(only) - {word for kind in kinds for word in kind})
    if unknown:
        known = ", ".join(word for kind in kinds for word in kind)
        raise SystemExit(f"--only: there is no {unknown[0]!r} (there are {known})")
    workloads, methods, precisions, modes = ([word for word in kind if word in only] or list(kind) for kind in kinds)
    return [
        Cell(side, workload, method, precision, mode)
        for workload in workloads
        for method in methods
        for precision in precisions
        for mode in modes
        for side in ("luthier", "trl")
    ]


def bound_cells() -> list[Cell]:
    """The cells that the bounds are about, and no others."""
    wanted = dict.fromkeys((bound.workload, bound.method, bound.precision, bound.mode) for bound in BOUNDS)
    return [Cell(side, *cell) for cell in wanted for side in ("luthier", "trl")]


def environment(threads: int) -> dict[str, str]:
    """Fixed threads for both sides, and no network."""
    count = str(threads)
    fixed = {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **fixed}


def call(script: str, *arguments: str, threads: int) -> list[str]:
    """Run a script of this directory in a process of its own.

    Returns:
        the lines of its standard output.

    Raises:
        SystemExit: it failed; what it said is on standard error already.
    """
    command = [sys.executable, str(HERE / script), *arguments]
    ended = subprocess.run(command, env=environment(threads), stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {ended.returncode}")
    return ended.stdout.splitlines()


def run_cell(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    arguments = [
        f"--workload={cell.workload}", f"--method={cell.method}", f"--precision={cell.precision}",
        f"--steps={args.steps}", f"--warmup={args.warmup}", f"--budget={args.budget}", f"--threads={args.threads}",
        f"--work={args.work}",
    ]  # fmt: skip
    if cell.side == "trl":
        arguments.append(f"--mode={cell.mode}")
    result: dict[str, Any] = json.loads(call(f"{cell.side}_runner.py", *arguments, threads=args.threads)[-1])
    return {**result, "mode": cell.mode}


def loading_bounds(threads: int) -> list[dict[str, Any]]:
    """What loading a model costs in memory, with the bound of each: name, limit, ratio."""
    peaks, bounds = {}, []
    for line in call("loading.py", threads=threads)[1:]:
        name, dtype, who, size, peak, *_ = line.split()
        peaks[name, dtype, who] = float(peak)
        if (name, who) == ("safetensors", "luthier"):
            ratio = float(peak) / float(size)
            bounds.append(
                {"name": f"loading safetensors in {dtype}: peak memory / weights", "limit": 1.1, "ratio": ratio}
            )
    for dtype in PRECISIONS:
        if ("gguf", dtype, "luthier") in peaks:
            ratio = peaks["gguf", dtype, "luthier"] / peaks["gguf", dtype, "plain"]
            name = f"loading GGUF in {dtype}: peak memory / plain Transformers'"
            bounds.append({"name": name, "limit": 1.0, "ratio": ratio})
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="cut to these: qwen3 smollm2, lora full, bf16 fp32, default packed tuned",
    )
    parser.add_argument("--bounds", action="store_true", help="only what the bounds need: about half an hour of CPU")
    parser.add_argument("--quick", action="store_true", help="2 steps after 1 of warm-up: a first impression")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step, about")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=default_directory(), help="where models and rows are kept")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run: keep the cells it has")
    parser.add_argument("--output", type=Path, help="write the table here; benchmarks/results.md for a whole run")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.warmup = 2, 1
    if args.output is None and not args.quick and not args.only:
        args.output = HERE / "results.md"
    return args


def main() -> None:
    args = parse()
    cells = bound_cells() if args.bounds else plan(args.only)
    for workload in dict.fromkeys(cell.workload for cell in cells):
        print(f"preparing {workload}", file=sys.stderr)
        prepare(workload, args.work)
    raw = args.work / f"cells-{args.steps}-{args.warmup}-{args.budget}-{args.threads}.jsonl"
    if not args.resume:
        raw.unlink(missing_ok=True)
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    have = {tuple(result[key] for key in ("side", "workload", "method", "precision", "mode")) for result in done}
    for number, cell in enumerate(cells, 1):
        if (cell.side, cell.workload, cell.method, cell.precision, cell.mode) in have:
            continue
        result = run_cell(cell, args)
        done.append(result)
        with raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        rate, peak = result["tokens_per_cpu_second"], result["peak_bytes"] / 1e6
        print(f"[{number}/{len(cells)}] {cell.name}: {rate:.1f} tokens/CPU-s, {peak:,.0f} MB", file=sys.stderr)
    gemm = json.loads(call("gemm.py", f"--threads={args.threads}", threads=args.threads)[-1])
    loading = [] if args.only or args.quick else loading_bounds(args.threads)
    text = render(done, BOUNDS, gemm, loading, args)
    print(text)
    if args.output is not None:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
