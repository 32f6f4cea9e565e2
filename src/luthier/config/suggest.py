"""Which key a user meant: the nearest of those there are, other sections and other tools' words included."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

ELSEWHERE = {
    "base_model": "model",
    "batch_size": "train.rows_per_step",
    "bf16": "train.precision",
    "checkpointing": "train.activation_checkpointing",
    "clip_grad_norm": "train.max_gradient_norm",
    "cutoff_len": "data.sequence_length",
    "dataset": "data",
    "dataset_name": "data",
    "dtype": "train.precision",
    "early_stopping_patience": "evaluation.early_stopping",
    "eval": "evaluation",
    "eval_dataset": "data.validation",
    "eval_steps": "evaluation.every",
    "fp16": "train.precision",
    "global_batch_size": "train.rows_per_step",
    "gradient_accumulation_steps": "train.rows_per_step",
    "gradient_checkpointing": "train.activation_checkpointing",
    "logging_steps": "report.every",
    "lora": "adapter",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target_modules": "adapter.target",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "train.max_gradient_norm",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_steps": "train.steps",
    "micro_batch_size": "train.rows_per_step",
    "model_name": "model",
    "model_name_or_path": "model",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer.name",
    "output_dir": "output",
    "per_device_train_batch_size": "train.rows_per_step",
    "report_to": "report.trackers",
    "router_aux_loss_coef": "moe.aux_loss",
    "sample_packing": "data.packing",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "schedule",
    "seq_len": "data.sequence_length",
    "sequence_len": "data.sequence_length",
    "target_modules": "adapter.target",
    "use_rslora": "adapter.rslora",
    "val_set_size": "data.validation_fraction",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
}
"""What other tools call a setting -> what it is called here."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when none is much like it."""
    by_form = {_form(name): name for name in known}
    close = difflib.get_close_matches(_form(word), by_form, n=1, cutoff=0.6)
    return by_form[close[0]] if close else None


def nearest_key(section: Sequence[str], key: str, known: Iterable[str]) -> str | None:
    """The full path of the key that someone meant who wrote `key` in `section`.

    Args:
        section: path of the section in which the key stands, () for the top.
        key: the key that is not known there.
        known: full paths of all keys there are ("adapter.rank").
    """
    paths = list(known)
    prefix = "".join(f"{part}." for part in section)
    siblings = [path[len(prefix) :] for path in paths if path.startswith(prefix) and "." not in path[len(prefix) :]]
    sibling = nearest(key, siblings)
    if sibling is not None and _likeness(key, sibling) >= 0.8:
        return prefix + sibling
    if (meant := ELSEWHERE.get(_form(key))) in paths:
        return meant
    for path in sorted(paths, key=lambda path: path.count(".")):
        if _form(path.rpartition(".")[2]) == _form(key):
            return path
    if sibling is not None:
        return prefix + sibling
    leaves = {path.rpartition(".")[2]: path for path in sorted(paths, key=lambda path: -path.count("."))}
    leaf = nearest(key, leaves)
    return leaves[leaf] if leaf is not None and _likeness(key, leaf) >= 0.75 else None


def _form(word: str) -> str:
    return word.lower().replace("-", "_")


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, _form(left), _form(right)).ratio()
