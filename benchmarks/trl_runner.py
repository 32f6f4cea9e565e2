"""One cell of the benchmark on TRL's side: SFTTrainer, with PEFT for LoRA; prints one JSON line.

Modes: `default` is TRL as it comes; `packed` sets packing; `tuned` packs and also sets what a user who reads the
documentation would set on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from meter import Meter
from workloads import IGNORED, WORKLOADS, Row, Workload, default_directory, prepare, useful_flops_per_token

DEFAULT_BATCH = 8  # SFTConfig's own per_device_train_batch_size
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-4


class MeasuredTrainer(SFTTrainer):
    """Reads what each microbatch holds on its way to the model; changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tokens = self.trained = 0
        self.step_loss: torch.Tensor | float = 0.0
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        self.trained += int((inputs["labels"][:, 1:] != IGNORED).sum())
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[no-untyped-call]
        self.step_loss += loss.detach()
        return loss


class Stopwatch(TrainerCallback):
    def __init__(self, meter: Meter, profiler: Any) -> None:
        self.meter, self.profiler = meter, profiler
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        self.meter.step(tokens=trainer.tokens, trained=trainer.trained, loss=float(trainer.step_loss))
        trainer.tokens = trainer.trained = 0
        trainer.step_loss = 0.0
        if self.profiler is not None and state.global_step == self.meter.warmup:
            self.profiler.start()


def settings(mode: str, precision: str, mean_length: float, budget: int, steps: int, output: str) -> SFTConfig:
    """TRL's arguments for one mode, all of about `budget` tokens a step.

    Args:
        mode: default, packed or tuned.
        precision: bf16 (weights in bf16 too, which is the faster of TRL's two ways) or fp32.
        mean_length: of the rows.
        budget: tokens a step.
        steps: optimizer steps, warm-up included.
        output: a directory.
    """
    common: dict[str, Any] = {
        "output_dir": output,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "bf16": precision == "bf16",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
        "model_init_kwargs": {"dtype": "bfloat16" if precision == "bf16" else "float32"},
    }
    match mode:
        case "default":
            accumulation = max(1, round(budget / (DEFAULT_BATCH * mean_length)))
            return SFTConfig(**common, gradient_accumulation_steps=accumulation)
        case "packed":
            return SFTConfig(**common, packing=True, max_length=budget, per_device_train_batch_size=1)
        case "tuned":
            common["model_init_kwargs"] |= {"attn_implementation": "sdpa"}
            return SFTConfig(
                **common,
                packing=True,
                max_length=budget,
                per_device_train_batch_size=1,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                logging_strategy="no",
                disable_tqdm=True,
            )
        case _:
            raise ValueError(f"unknown mode {mode!r}")


def same_predictions(prepared: Dataset, rows: list[Row]) -> None:
    """Check that TRL, after its own preparation, trains on what the rows say.

    Raises:
        RuntimeError: tokens or trained tokens got lost or came in.
    """
    theirs = [
        sum(map(len, prepared["input_ids"])),
        sum(label != IGNORED for row in prepared["labels"] for label in row),
    ]
    ours = [sum(len(row.input_ids) for row in rows), sum(row.trained for row in rows)]
    if theirs != ours:
        raise RuntimeError(f"TRL has {theirs} tokens and trained tokens, the rows have {ours}")


def run(
    workload: Workload, method: str, precision: str, mode: str, steps: int, warmup: int, budget: int, profile: bool
) -> None:
    meter = Meter(warmup)
    rows = workload.read()
    mean_length = sum(len(row.input_ids) for row in rows) / len(rows)
    profiler = torch.profiler.profile(record_shapes=True) if profile else None
    watch = Stopwatch(meter, profiler)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(sys.stderr):
        trainer: Any = MeasuredTrainer(
            model=str(workload.model),
            args=settings(mode, precision, mean_length, budget, steps + warmup, output),
            train_dataset=Dataset.from_list([{"input_ids": row.input_ids, "labels": row.labels} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(workload.model),
            peft_config=adapter if method == "lora" else None,
            callbacks=[watch],
        )
        watch.trainer = trainer
        same_predictions(trainer.train_dataset, rows)
        trainer.train()
        if profiler is not None:
            profiler.stop()
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
            shapes = profiler.key_averages(group_by_input_shape=True)
            print(shapes.table(sort_by="self_cpu_time_total", row_limit=25, max_shapes_column_width=100))
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    meter.report(
        side="trl",
        workload=workload.name,
        method=method,
        precision=precision,
        mode=mode,
        trainable=trainable,
        microbatches=trainer.args.gradient_accumulation_steps,
        useful_flops_per_token=useful_flops_per_token(trainer.model.config, rows, method, RANK),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--method", choices=["lora", "full"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    parser.add_argument("--mode", choices=["default", "packed", "tuned"], required=True)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--budget", type=int, default=2048, help="tokens a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=default_directory(), help="where workloads are kept")
    parser.add_argument("--profile", action="store_true", help="torch profiler over the measured steps, to stderr")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run(
        prepare(args.workload, args.work),
        args.method,
        args.precision,
        args.mode,
        args.steps,
        args.warmup,
        args.budget,
        args.profile,
    )


if __name__ == "__main__":
    main()
