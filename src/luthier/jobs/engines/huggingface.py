"""The same run through TRL's SFTTrainer, with PEFT for adapters, so that a user can compare. Imports neither.

What SFTTrainer has no word for is refused by name before anything starts; `huggingface_run.py` is what then trains, and
docs/jobs-notebooks.md says in what the two trainers differ even so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luthier.errors import ConfigError
from luthier.jobs.engines.base import register_engine

if TYPE_CHECKING:
    from luthier.config import RunConfig
    from luthier.config.sections import LoraConfig, SourceConfig

FORMATS = ("text", "instruct", "chat")
PROGRAM = "luthier.jobs.engines.huggingface_run"
ROLES = {
    "attn": ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}
"""Roles -> what the linear layers of that role are called in most models: PEFT knows names alone."""

_OWN = "use the luthier engine for that, or leave it out"
_FEWER = "use the luthier engine, or more processes: each holds a copy of the model and reads rows of its own"
_NAME = re.compile(r"[\w.-]+")


@register_engine("huggingface")
class HuggingFaceEngine:
    """TRL's SFTTrainer under torchrun."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse what SFTTrainer does not do, all of it at once."""
        from luthier.config.faults import raise_all
        from luthier.config.load import check_config

        run, faults = check_config(config)
        where = [".".join(("config", *fault.path)) for fault in faults]
        errors = [ConfigError(f.what, where=w, remedy=f.remedy) for f, w in zip(faults, where, strict=True)]
        raise_all(errors if run is None else list(refusals(run)))

    def command(self, config: Path) -> list[str]:
        return [sys.executable, "-m", "luthier.jobs.engines.torchrun", "-m", PROGRAM, str(config)]


def refusals(run: RunConfig) -> Iterator[ConfigError]:
    """All that a run asks for and SFTTrainer does not do."""
    for path, allowed, what, remedy in _FIELDS:
        value: Any = run
        for part in path.split("."):
            value = getattr(value, part, None)
        if not (allowed(value) if callable(allowed) else value in allowed):
            yield _refusal(path, what, remedy)
    yield from _model(run.model)
    for name, sources in (("train", run.data.train), ("validation", run.data.validation)):
        for number, source in enumerate(sources or ()):
            yield from _source(source, f"data.{name}.{number}")
        if sources is not None and len({source.train_on_input for source in sources}) > 1:
            yield _refusal(f"data.{name}", "differ in train_on_input, which SFTTrainer has for all rows alike", _OWN)
    if run.adapter is not None:
        if run.adapter.kind == "lora":
            yield from _adapter(run.adapter)
        else:
            yield _refusal("adapter.kind", f"SFTTrainer is given LoRA, not {run.adapter.kind}", _OWN)
        if run.checkpoint.trainable_only is False:
            yield _refusal("checkpoint.trainable_only", "is what PEFT always does with adapters", "leave it out")


def _refusal(path: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where=f"config.{path}", remedy=remedy)


def _model(model: str) -> Iterator[ConfigError]:
    if model.startswith(("package:", "debug:")) or model.endswith(".gguf"):
        remedy = "name a Hub id or a directory of Transformers; luthier export writes one"
        yield _refusal("model", f"SFTTrainer cannot train {model}", remedy)


def _source(source: SourceConfig, at: str) -> Iterator[ConfigError]:
    if source.format is not None and source.format not in FORMATS:
        yield _refusal(f"{at}.format", f"{source.format} is Luthier's own", f"use {', '.join(FORMATS)}, or {_OWN}")
    if source.kind is not None:
        yield _refusal(f"{at}.kind", "files of a directory are chosen by datasets itself", "name the files by a glob")
    if source.image_column is not None or source.image_root is not None:
        yield _refusal(f"{at}.image_column", "rows with images are not handed to SFTTrainer", _OWN)
    if source.weight is not None:
        yield _refusal(f"{at}.weight", "SFTTrainer takes all rows of all sources", _OWN)


def _adapter(adapter: LoraConfig) -> Iterator[ConfigError]:
    names = [name for name in adapter.target if name not in (*ROLES, "all-linear")]
    for name in names:
        if name in ("unembed", "lm_head"):
            yield _refusal("adapter.target", "SFTTrainer trains no adapter on the output layer", "leave unembed out")
        elif name in ("experts", "embed"):
            yield _refusal("adapter.target", f"PEFT knows no role {name}", "name the modules")
        elif not _NAME.fullmatch(name) and len(adapter.target) > 1:
            yield _refusal("adapter.target", f"PEFT takes a pattern ({name}) only by itself", "use one pattern for all")
    if adapter.init not in ("default", "gaussian", "orthogonal"):
        yield _refusal("adapter.init", f"SFTTrainer's export of {adapter.init} is for another base", _OWN)
    if adapter.learning_rate_ratio is not None:
        yield _refusal("adapter.learning_rate_ratio", "SFTTrainer has one learning rate", _OWN)
    for name in adapter.train_modules:
        if not _NAME.fullmatch(name):
            yield _refusal("adapter.train_modules", f"PEFT takes names and no patterns ({name})", "name the modules")


def targets(adapter: LoraConfig) -> str | list[str]:
    """PEFT's `target_modules` for an adapter that was not refused."""
    if "all-linear" in adapter.target or {*ROLES} <= {*adapter.target}:
        return "all-linear"
    if len(adapter.target) == 1 and not _NAME.fullmatch(adapter.target[0]):
        return adapter.target[0]
    return [part for name in adapter.target for part in ROLES.get(name, (name,))]


_Allowed = tuple[Any, ...] | Callable[[Any], bool]

_FIELDS: list[tuple[str, _Allowed, str, str]] = [
    ("tokenizer", (None,), "SFTTrainer takes the model's own tokenizer", "put another one's files beside the model"),
    ("method.name", ("sft",), "SFTTrainer knows no other method", _OWN),
    ("from_scratch", (False,), "SFTTrainer begins with pretrained weights", _OWN),
    ("data.train", lambda value: value is not None, "is missing", "name the rows"),
    ("data.validation_fraction", (None,), "other rows would be held out", "name validation rows"),
    ("data.too_long", ("truncate",), "SFTTrainer cuts long rows off", "set truncate, or " + _OWN),
    ("data.on_bad_row", ("raise",), "SFTTrainer skips no rows", _OWN),
    ("data.streaming", (False,), "rows are read before the first step here", _OWN),
    (
        "data.chat_template",
        lambda value: value is None or value.endswith((".jinja", ".j2")),
        "SFTTrainer takes a chat template from a .jinja file",
        "rename it",
    ),
    ("adapter.start_from", (None,), "SFTTrainer begins with new adapters", _OWN),
    ("adapter.new_tokens", (None, []), "SFTTrainer adds no tokens to a tokenizer", _OWN),
    ("adapter.quantize", (None,), "SFTTrainer is given plain weights", _OWN),
    ("adapter.dtype", (None, "fp32"), "PEFT keeps adapters in fp32", "leave it out"),
    (
        "optimizer.name",
        ("adamw", "sgd", "adafactor"),
        "SFTTrainer has no such optimizer",
        "use adamw, sgd or adafactor",
    ),
    ("optimizer.in_backward", (False,), "SFTTrainer takes its steps after the backward pass", _OWN),
    ("optimizer.state_dtype", (None, "fp32"), "moments are in the weights' dtype here", _OWN),
    ("schedule.name", ("constant", "linear", "cosine", "wsd"), "SFTTrainer has no such one", "use wsd or cosine"),
    (
        "schedule",
        lambda value: value.name != "linear" or not value.minimum,
        "SFTTrainer's linear schedule ends at 0",
        "leave minimum out, or use cosine",
    ),
    ("train.tokens_per_step", (None,), "SFTTrainer counts rows", "set rows_per_step"),
    ("train.on_non_finite", ("stop",), "SFTTrainer skips no steps", _OWN),
    (
        "train.activation_checkpointing",
        ("off", "full", "offloaded"),
        "SFTTrainer means something else by that",
        "use full or offloaded",
    ),
    ("train.compile", (False,), "SFTTrainer does not compile layer by layer", _OWN),
    ("train.device", (None, "cpu", "cuda"), "SFTTrainer chooses among GPUs itself", "set cpu or cuda"),
    ("train.profile", (None,), "SFTTrainer takes no profiles", _OWN),
    ("parallel.dp_shard", (-1, 1), "weights are not sharded here", "set dp_replicate, or use the luthier engine"),
    ("parallel.tp", (1,), "there is no tensor parallelism here", _FEWER),
    ("parallel.cp", (1,), "there is no context parallelism here", _FEWER),
    ("parallel.pp", (1,), "there is no pipeline here", _FEWER),
    ("parallel.ep", (1,), "there is no expert parallelism here", _FEWER),
    ("parallel.cpu_offload", (False,), "weights are not sharded here", _OWN),
    ("moe.bias_update_rate", (None,), "SFTTrainer moves no biases of routers", _OWN),
    ("evaluation.early_stopping", (None,), "SFTTrainer goes on to the end", _OWN),
]
"""Fields that not every value can be done of: path, values or what tells them, what is wrong with others, remedy."""
