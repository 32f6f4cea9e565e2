"""`python -m luthier.jobs.engines.huggingface_run CONFIG`: a Luthier run by TRL's SFTTrainer, on each rank of torchrun.

The run directory holds what a run of Luthier's own does: metrics.jsonl, checkpoints/ (Transformers' own kind) and
export/. Started again, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luthier.errors import EXIT_USER_ERROR, ConfigError, NonFiniteError, UserError, first_line
from luthier.jobs.engines.huggingface import refusals, targets
from luthier.jobs.progress import METRICS

if TYPE_CHECKING:
    from luthier.config import RunConfig
    from luthier.config.schedules import ScheduleConfig
    from luthier.config.sections import OptimizerConfig

CHECKPOINTS, EXPORT = "checkpoints", "export"
LARGEST_BATCH = 8
"""Rows that a process computes at a time at most: SFTTrainer's own default."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_NAMES = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "epoch": "epoch",
    "aux_loss": "aux_loss",
    "eval_loss": "validation_loss",
}
"""SFTTrainer's names of metrics -> Luthier's."""


def main(path: str) -> int:
    """Train by a YAML file; returns what to leave with."""
    try:
        return train(_read(path))
    except UserError as error:
        if _rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _read(path: str) -> RunConfig:
    from luthier.config import load_config
    from luthier.config.faults import raise_all

    config = load_config(path)
    raise_all(list(refusals(config)))
    return config


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def train(config: RunConfig) -> int:
    """Train to the end, or go on with a run; returns what to leave with."""
    try:
        import datasets
        import torch
        from peft import LoraConfig
        from trl import SFTTrainer  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "pip install luthier[huggingface]"
        raise UserError(f"needs {error.name}, which is not installed", where="trainer.engine", remedy=remedy) from None
    from luthier.jobs.engines.huggingface_rows import read

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    datasets.disable_progress_bars()
    if not config.data.cache:
        datasets.disable_caching()
    assert config.data.train is not None  # refused else
    rows, turns = read(config.data.train, "data.train")
    held_out = None
    if config.data.validation:
        held_out, also = read(config.data.validation, "data.validation")
        if also != turns or held_out.column_names != rows.column_names:
            raise ConfigError("rows are of another format than the training rows", where="data.validation")
        if config.evaluation.rows is not None:
            held_out = held_out.select(range(min(config.evaluation.rows, len(held_out))))
    adapter = None
    if config.adapter is not None and config.adapter.kind == "lora":  # others were refused
        alpha: Any = config.adapter.alpha or 2 * config.adapter.rank  # PEFT says int, and divides
        init: Any = True if config.adapter.init == "default" else config.adapter.init  # PEFT names them one by one
        adapter = LoraConfig(
            r=config.adapter.rank,
            lora_alpha=alpha,
            lora_dropout=config.adapter.dropout,
            use_rslora=config.adapter.rslora,
            use_dora=config.adapter.dora,
            init_lora_weights=init,
            target_modules=targets(config.adapter),
            modules_to_save=list(config.adapter.train_modules) or None,
            task_type="CAUSAL_LM",
        )
    arguments = settings(config, len(rows), turns, evaluates=held_out is not None)
    try:
        trainer = _trainer(config, arguments, rows, held_out, adapter)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        marked = "name a template that has {% generation %} around answers (data.chat_template)"
        what = f"SFTTrainer refuses the run: {first_line(error).rstrip('.')}"
        raise UserError(what, where="trainer.engine", remedy=marked if turns else None) from error
    checkpoint = newest(config.output / CHECKPOINTS)
    trainer.begin(int(checkpoint.name.rpartition("-")[2]) if checkpoint is not None else 0)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if trainer.state.global_step < trainer.state.max_steps:  # told to stop: the checkpoint is written
        return 128 + signal.SIGTERM
    export(trainer, config.output / EXPORT)
    return 0


def settings(config: RunConfig, rows: int, turns: bool, *, evaluates: bool) -> dict[str, Any]:
    """Arguments of `SFTConfig` that a run means.

    Args:
        config: the run.
        rows: that it trains on.
        turns: whether assistant turns are to be found by the chat template.
        evaluates: whether there are rows to measure on.

    Raises:
        ConfigError: ranks cannot share a step's rows evenly.
    """
    import torch

    train, ranks = config.train, int(os.environ.get("WORLD_SIZE", 1))
    batch = train.rows_per_step or 16
    if batch % ranks:
        what = f"{batch} rows cannot be dealt out evenly to {ranks} processes"
        raise ConfigError(what, where="train.rows_per_step", remedy=f"set a multiple of {ranks}")
    each = batch // ranks
    together = max(size for size in range(1, LARGEST_BATCH + 1) if each % size == 0)
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    precision = train.precision or ("bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "fp32")
    model: dict[str, Any] = {"dtype": _DTYPES[precision]}
    model |= {"attn_implementation": train.attention} if train.attention is not None else {}
    model |= {"revision": config.revision} if config.revision is not None else {}
    steps = train.steps or math.ceil((train.epochs or 1) * math.ceil(rows / batch))
    whole = config.data.train is not None and config.data.train[0].train_on_input
    return {
        "output_dir": str(config.output / CHECKPOINTS),
        "seed": config.seed % 2**32,  # as much as NumPy takes
        "model_init_kwargs": model,
        "trust_remote_code": config.trust_remote_code,
        "router_aux_loss_coef": config.moe.aux_loss,
        "chat_template_path": config.data.chat_template,
        # Luthier counts what is predicted: a row of n tokens has n - 1.
        "max_length": config.data.sequence_length + 1,
        "train_sampling_strategy": "random" if config.data.shuffle else "sequential",
        "assistant_only_loss": turns,
        "completion_only_loss": False if whole else None,
        "max_steps": train.steps or -1,
        "num_train_epochs": train.epochs or 1,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": each // together,
        "per_device_eval_batch_size": LARGEST_BATCH,
        "use_cpu": on_cpu,
        "bf16": precision == "bf16",
        "max_grad_norm": train.max_gradient_norm or 0.0,
        "gradient_checkpointing": train.activation_checkpointing != "off",
        "activation_offloading": train.activation_checkpointing == "offloaded",
        "dataloader_pin_memory": not on_cpu,
        "logging_steps": config.report.every,
        "logging_first_step": True,
        "report_to": list(config.report.trackers) or "none",
        "project": config.report.project,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": config.checkpoint.every or max(steps, 1),
        "save_total_limit": config.checkpoint.keep,
        "enable_jit_checkpoint": True,  # on SIGTERM
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": config.evaluation.every or max(steps, 1),
        **_optimizer(config.optimizer),
        **_schedule(config.schedule, steps),
    }


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {"learning_rate": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "adamw":
        first, second = optimizer.betas
        arguments |= {"optim": "adamw_torch", "adam_beta1": first, "adam_beta2": second}
        arguments["adam_epsilon"] = optimizer.epsilon
    return arguments


def _optimizer_class(optimizer: OptimizerConfig) -> tuple[Any, dict[str, Any]] | None:
    """Of those that SFTTrainer takes as a class: torch's own, with the arguments that it does not set itself."""
    import torch

    rate = {"lr": optimizer.learning_rate}
    match optimizer.name:
        case "sgd":
            return torch.optim.SGD, rate | {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
        case "adafactor":
            return torch.optim.Adafactor, rate | {"beta2_decay": optimizer.beta2_decay, "d": optimizer.clip_threshold}
    return None


def _schedule(schedule: ScheduleConfig, steps: int) -> dict[str, Any]:
    """Transformers' schedules; their first step is where Luthier's is before its first."""
    warmup = _in_steps(schedule.warmup, steps)
    more: dict[str, Any] = {}
    match schedule.name:
        case "constant":
            name = "constant_with_warmup"
        case "linear":
            name = "linear"
        case "cosine":
            name, more = "cosine_with_min_lr", {"min_lr_rate": schedule.minimum}
        case "wsd":
            name = "warmup_stable_decay"
            shape = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}[schedule.shape]
            more = {"num_decay_steps": _in_steps(schedule.decay, steps), "min_lr_ratio": schedule.minimum}
            more["decay_type"] = shape
        case _:
            raise AssertionError(f"{schedule.name} was to be refused")
    return {"lr_scheduler_type": name, "warmup_steps": warmup, "lr_scheduler_kwargs": more}


def _in_steps(amount: float, total: int) -> int:
    """Steps that an amount stands for: below 1 it is a share of all steps. Rounded up."""
    return math.ceil(round(amount * total if amount < 1.0 else amount, 9))


def _trainer(config: RunConfig, arguments: dict[str, Any], rows: Any, held_out: Any, adapter: Any) -> Any:
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    class Trainer(SFTTrainer):
        """Keeps what it logs as rows of metrics.jsonl, and stops at a loss that is not finite."""

        def begin(self, step: int) -> None:
            """Make ready to go on after a step."""
            self.metrics = config.output / METRICS
            # SFTTrainer counts tokens anew.
            self.before = keep_rows(self.metrics, step) if self.is_world_process_zero() else 0
            self.last, self.clock = step, time.perf_counter()

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log(logs, start_time)
            row = {name: logs[key] for key, name in _NAMES.items() if isinstance(logs.get(key), int | float)}
            step = self.state.global_step
            if not any("loss" in name for name in row):
                return  # how long everything took
            if "eval_loss" in logs:
                row.pop("epoch", None)
            else:
                row["tokens"] = self.before + logs["num_tokens"]
                now = time.perf_counter()
                row["step_seconds"] = (now - self.clock) / max(1, step - self.last)
                self.last, self.clock = step, now
            if self.is_world_process_zero():
                with self.metrics.open("a", encoding="utf-8") as file:
                    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
                    file.write(json.dumps({"step": step} | finite) + "\n")
            if not math.isfinite(row.get("loss", 0.0)):
                remedy = "lower optimizer.learning_rate"
                raise NonFiniteError(f"the loss is {row['loss']}", where=f"step {step}", remedy=remedy)

    collator = None
    if config.data.packing:
        # Rows of a batch end to end, without padding. TRL's own packing would make other steps of the same rows.
        collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return Trainer(
        model=_location(config.model),
        args=SFTConfig(**arguments),
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=collator,
        peft_config=adapter,
        optimizer_cls_and_kwargs=_optimizer_class(config.optimizer),
    )


def _location(model: str) -> str:
    return model.removeprefix("hf://") if not Path(model).exists() else model


def newest(checkpoints: Path) -> Path | None:
    """The newest checkpoint that is whole: its state is written last."""
    found = [path for path in checkpoints.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    whole = [path for path in found if not (path / "checkpoint-is-incomplete.txt").exists()]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def keep_rows(path: Path, step: int) -> int:
    """Leave the rows of metrics up to a step, and no half one; returns the tokens up to there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    kept = [row for row in map(json.loads, lines) if row["step"] <= step]
    aside = path.with_name(f"{path.name}.writing")
    aside.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    os.replace(aside, path)
    return max((row["tokens"] for row in kept if "tokens" in row), default=0)


def export(trainer: Any, directory: Path) -> None:
    """Write what was trained as Transformers opens it, or as PEFT does where an adapter was trained."""
    aside = directory.with_name(f"{directory.name}.writing")
    if trainer.is_world_process_zero():
        shutil.rmtree(aside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(aside))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        (aside / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nothing reads back
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(aside, directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
