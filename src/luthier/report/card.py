"""The model card of an export: what it was made of, how, how well it does, and how to open it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from luthier.config import RunConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(config: RunConfig, measured: Mapping[str, Any], *, form: Literal["merge", "adapter"]) -> str:
    """Markdown with the metadata header of the Hub.

    Local directories are cut to their last name, credentials and query strings of URLs are left out.

    Args:
        config: of the run.
        measured: `loss` of the last step and `validation` (loss, perplexity, step, ...), each may be missing or None.
        form: "adapter" for PEFT files, "merge" for a whole model.
    """
    base = public_name(config.model)
    header = ["---", f"library_name: {'peft' if form == 'adapter' else 'transformers'}"]
    if _HUB_ID.fullmatch(config.model):
        header += [f"base_model: {config.model}"]
    header += [
        f"pipeline_tag: {'text-classification' if config.method.name == 'reward' else 'text-generation'}",
        "tags:",
        "- luthier",
        *([f"- {config.adapter.kind}"] if config.adapter else []),
        "---",
    ]
    parts = [
        "\n".join(header),
        f"# {config.output.name or 'Fine-tuned model'}",
        f"{_method(config)} of {base}, made with [Luthier](https://pypi.org/project/luthier/).",
        "## Data\n\n" + "\n".join(_sources(config)),
        "## Training\n\n" + _table(_settings(config)),
    ]
    if numbers := _measurements(measured):
        parts.append("## Measured\n\n" + _table(numbers))
    parts.append("## Use\n\n" + _usage(config, form))
    return "\n\n".join(parts) + "\n"


def public_name(path: str) -> str:
    """A path or URL as strangers may see it.

    >>> public_name("https://me:secret@example.org/rows.jsonl?token=abc"), public_name("/home/me/rows.jsonl")
    ('https://example.org/rows.jsonl', 'rows.jsonl')
    >>> public_name("hf://owner/rows"), public_name("Qwen/Qwen3-0.6B"), public_name("../data/rows.jsonl")
    ('hf://owner/rows', 'Qwen/Qwen3-0.6B', 'rows.jsonl')
    """
    if "://" in path:
        url = urlsplit(path)
        return urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    if _HUB_ID.fullmatch(path) or ":" in path:
        return path
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


_KINDS = {"prompt": "Prompt tuning", "prefix": "Prefix tuning", "adaption_prompt": "A LLaMA-Adapter"}


def _method(config: RunConfig) -> str:
    if config.from_scratch:
        return "Training from random weights by the architecture"
    if config.adapter is None:
        return "Full fine-tuning"
    if config.adapter.kind != "lora":
        return f"{_KINDS[config.adapter.kind]}, which learns in the place of text,"
    return f"LoRA fine-tuning (rank {config.adapter.rank} on {', '.join(config.adapter.target)})"


def _sources(config: RunConfig) -> list[str]:
    lines = []
    for role, sources in (("trained on", config.data.train), ("measured on", config.data.validation)):
        for source in sources or []:
            details = [source.format] if source.format else []
            details += [f"subset {source.subset}"] if source.subset else []
            details += [f"split {source.split}"] if source.path.startswith("hf://") else []
            lines.append(f"- {role}: `{public_name(source.path)}`" + (f" ({', '.join(details)})" if details else ""))
    if config.data.validation_fraction:
        lines.append(f"- measured on: {config.data.validation_fraction:.1%} of the rows, never trained on")
    return lines or ["- not recorded"]


def _settings(config: RunConfig) -> list[tuple[str, str]]:
    train, optimizer = config.train, config.optimizer
    settings = [
        (
            "optimizer",
            f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, weight decay {optimizer.weight_decay:g}",
        ),
        ("schedule", f"{config.schedule.name}, warm-up {config.schedule.warmup:g}"),
        ("length", f"{train.steps} steps" if train.steps else f"{train.epochs or 1:g} epochs"),
        (
            "batch",
            f"{train.tokens_per_step:,} tokens a step"
            if train.tokens_per_step
            else f"{train.rows_per_step or 16} rows a step",
        ),
        ("sequence length", f"{config.data.sequence_length:,} tokens"),
        ("seed", str(config.seed)),
    ]
    if train.precision:
        settings.append(("precision", train.precision))
    if (adapter := config.adapter) is not None and adapter.kind != "lora":
        sizes = adapter.model_dump(exclude={"start_from", "dtype"}, exclude_none=True)
        settings.append(("adapter", ", ".join(f"{key} {value}" for key, value in sizes.items())))
    elif adapter is not None:
        alpha = adapter.alpha or 2.0 * adapter.rank
        scale = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
        settings.append(
            ("adapter", f"rank {adapter.rank}, alpha {alpha:g}, scale {scale}, dropout {adapter.dropout:g}")
        )
    return settings


def _measurements(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    numbers = []
    if (validation := measured.get("validation")) is not None:
        numbers.append(("validation loss (nats a token)", f"{validation['loss']:.4f}"))
        if "perplexity" in validation:
            numbers.append(("validation perplexity", f"{validation['perplexity']:.3f}"))
        if "reward_margin" in validation:
            numbers.append(("validation reward margin", f"{validation['reward_margin']:.3f}"))
        if "step" in validation:
            numbers.append(("measured at step", str(validation["step"])))
    if (loss := measured.get("loss")) is not None:
        numbers.append(("training loss of the last step (nats a token)", f"{loss:.4f}"))
    return numbers


def _usage(config: RunConfig, form: str) -> str:
    if form == "adapter":
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained("DIRECTORY")',
            'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")',
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("DIRECTORY", dtype="auto")',
            'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")',
        ]
    text = "\n".join(lines)
    if config.method.name == "reward":
        text = text.replace("ForCausalLM", "ForSequenceClassification")
        text = text.replace('"DIRECTORY")', '"DIRECTORY", num_labels=1)', 1) if form == "adapter" else text
    return f"```python\n{text}\n```"


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
