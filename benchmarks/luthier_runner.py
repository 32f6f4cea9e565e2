"""One cell of the benchmark on Luthier's side: the recipe behind `luthier train`; prints one JSON line.

The config is a user's: model, rows, method, precision and tokens a step; everything else is Luthier's default.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from luthier.config import RunConfig
from luthier.data.state import StepBatch
from luthier.recipes import sft
from meter import Meter
from workloads import WORKLOADS, Workload, default_directory, prepare, useful_flops_per_token

RANK, LEARNING_RATE = 16, 1e-4


def settings(
    workload: Workload, method: str, precision: str, steps: int, budget: int, threads: int, output: str
) -> RunConfig:
    """The run as a user would write it."""
    run: dict[str, Any] = {
        "model": str(workload.model),
        "data": {
            "train": {"path": str(workload.rows), "format": "token_rows:TokenRows"},
            "sequence_length": budget,
        },
        "optimizer": {"learning_rate": LEARNING_RATE},
        "train": {
            "steps": steps,
            "tokens_per_step": budget,
            "precision": precision,
            "device": "cpu",
            "threads": threads,
        },
        "output": output,
    }
    if method == "lora":
        run["adapter"] = {"rank": RANK}
    return RunConfig.model_validate(run)


def measure_steps(meter: Meter, found: dict[str, Any]) -> None:
    """Look at the stopwatch whenever the recipe has taken a step; what lies between two steps counts too."""
    take_step = sft.take_step

    def timed(run: sft.Run, batch: StepBatch) -> dict[str, float]:
        if not meter.clock:
            found["trainable"] = sum(weight.numel() for weight in run.state.model.parameters() if weight.requires_grad)
            meter.start()
        measured = take_step(run, batch)
        found["microbatches"] = len(batch.microbatches)
        # A document of n tokens is n - 1 positions here and n on TRL's side: count what the rows hold.
        meter.step(tokens=batch.tokens + batch.rows, trained=batch.trained_tokens, loss=measured["loss"])
        return measured

    sft.take_step = timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--method", choices=["lora", "full"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=default_directory(), help="where workloads are kept")
    args = parser.parse_args()
    meter = Meter(args.warmup)
    workload = prepare(args.workload, args.work)
    found: dict[str, Any] = {}
    measure_steps(meter, found)
    steps = args.steps + args.warmup
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(sys.stderr):
        config = settings(workload, args.method, args.precision, steps, args.budget, args.threads, output)
        sft.train(config, resume="never")
    shape = AutoConfig.from_pretrained(workload.model)
    meter.report(
        side="luthier",
        workload=workload.name,
        method=args.method,
        precision=args.precision,
        useful_flops_per_token=useful_flops_per_token(shape, workload.read(), args.method, RANK),
        **found,
    )


if __name__ == "__main__":
    main()
