"""From what Kubeflow calls a config to a Luthier run, as plain data; every field has one effect or a named refusal."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, assert_never

from luthier.config.faults import shown
from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.jobs.convert_data import data_source
from luthier.jobs.convert_sharding import put_sharding
from luthier.jobs.trainers import (
    AdapterConfig,
    DataType,
    LoraConfig,
    Loss,
    PeftConfig,
    PrefixConfig,
    TorchTuneConfig,
)

AT = "trainer.config"
ROWS_PER_STEP = 16
"""Of a run that says nothing, as in a Luthier YAML."""
CHAT_TEMPLATE = "chat_template.jinja"
"""A template that travels along, in the workspace."""

PLACES = {
    "epochs": "train.epochs",
    "max_steps": "train.steps",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "optimizer": "optimizer.name",
    "lr_scheduler": "schedule.name",
    "num_warmup_steps": "schedule.warmup",
    "max_seq_len": "data.sequence_length",
    "packed": "data.packing",
    "shuffle": "data.shuffle",
    "validation_fraction": "data.validation_fraction",
    "seed": "seed",
    "compile": "train.compile",
    "data_parallel_replicate_dim": "parallel.dp_replicate",
    "data_parallel_shard_dim": "parallel.dp_shard",
    "tensor_parallel_dim": "parallel.tp",
    "context_parallel_dim": "parallel.cp",
    "fsdp_cpu_offload": "parallel.cpu_offload",
    "device": "train.device",
    "tokenizer": "tokenizer",
    "save_every_n_steps": "checkpoint.every",
    "run_val_every_n_steps": "evaluation.every",
    "log_every_n_steps": "report.every",
}
"""Fields whose value is taken as it is -> where it goes."""
_DEGREES = [name for name in PLACES if name.endswith("_dim")]
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj", "o_proj": "o_proj"}
"""torchtune's name of a projection -> Transformers'."""

Word = TypeVar("Word", bound=StrEnum)


@dataclass
class Draft:
    """A run in the making.

    Attributes:
        config: plain data of a Luthier YAML.
        origins: path of a field in it -> path of what set it ("train.rows_per_step" -> "trainer.config.batch_size").
        files: text files for the workspace.
        errors: all that is wrong so far.
    """

    config: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    errors: list[ConfigError] = field(default_factory=list)

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set a field."""
        *sections, name = path.split(".")
        place = self.config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
        self.origins[path] = origin

    def refuse(self, where: str, what: str, remedy: str | None = None) -> None:
        self.errors.append(ConfigError(what, where=where, remedy=remedy))


def convert(config: TorchTuneConfig, base: dict[str, Any]) -> Draft:
    """Lay a config over what its runtime says.

    Args:
        config: whose values have the types of their fields.
        base: a Luthier run as plain data; it is not changed.

    Returns:
        the run, and what is wrong; ranges are checked by whoever reads the run.
    """
    draft = Draft(deepcopy(base))
    sharded = config.fsdp_config is not None or config.zero_config is not None
    if sharded or any(getattr(config, name) is not None for name in _DEGREES):
        draft.config.pop("parallel", None)  # one's own layout does not mix with the catalogue's
    for name, path in PLACES.items():
        if (value := getattr(config, name)) is not None:
            draft.put(path, value, f"{AT}.{name}")
    if config.epochs is not None and config.max_steps is not None:
        draft.refuse(f"{AT}.max_steps", "excludes epochs", "leave one of them out")
        draft.config["train"].pop("steps")
    if (dtype := word(DataType, config.dtype, f"{AT}.dtype", draft)) is not None:
        draft.put("train.precision", dtype.value, f"{AT}.dtype")
    word(Loss, config.loss, f"{AT}.loss", draft)  # there is one, which is what a step computes
    if config.clip_grad_norm is not None:
        draft.put("train.max_gradient_norm", config.clip_grad_norm or None, f"{AT}.clip_grad_norm")
    _batch(config, draft)
    _recomputation(config, draft)
    put_sharding(config, draft, AT, word)
    if config.chat_template is not None:
        carry_template(config.chat_template, f"{AT}.chat_template", draft)
    if config.peft_config is not None:
        draft.put("adapter", _peft(config.peft_config, draft), f"{AT}.peft_config")
    if config.dataset_preprocess_config is not None:
        source = data_source(config.dataset_preprocess_config, draft.config, draft.refuse)
        draft.files |= source.pop("files", {})
        draft.put("data.train", [source], f"{AT}.dataset_preprocess_config")
    return draft


def word(kind: type[Word], given: Word | str | None, where: str, draft: Draft) -> Word | None:
    """A member of an enum, given as such, by its value or by its name; None for none, or after an error."""
    if given is None:
        return None
    for member in kind:
        if given in (member, member.value, member.name):
            return member
    words = [member.value for member in kind]
    meant = nearest(str(given), words)
    what = f"{shown(str(given))} is not {' or '.join(words)}"
    draft.refuse(where, what, f'did you mean "{meant}"?' if meant else None)
    return None


def _batch(config: TorchTuneConfig, draft: Draft) -> None:
    """Rows of an optimizer step; 0 passes on, to be refused with the other ranges."""
    if config.batch_size is None and config.gradient_accumulation_steps is None:
        return
    rows, times = config.batch_size, config.gradient_accumulation_steps
    if rows is None:
        rows = draft.config.get("train", {}).get("rows_per_step", ROWS_PER_STEP)
    if times is not None and times < 1:
        draft.refuse(f"{AT}.gradient_accumulation_steps", f"must be at least 1, not {times}")
        times = 1
    origin = "batch_size" if config.batch_size is not None else "gradient_accumulation_steps"
    draft.put("train.rows_per_step", rows * (1 if times is None else times), f"{AT}.{origin}")


def _recomputation(config: TorchTuneConfig, draft: Draft) -> None:
    again, offload = config.enable_activation_checkpointing, config.enable_activation_offloading
    if offload and again is False:
        remedy = "leave enable_activation_checkpointing out"
        draft.refuse(f"{AT}.enable_activation_offloading", "needs the layers recomputed", remedy)
    elif offload:
        draft.put("train.activation_checkpointing", "offloaded", f"{AT}.enable_activation_offloading")
    elif again is not None:
        draft.put("train.activation_checkpointing", "full" if again else "off", f"{AT}.enable_activation_checkpointing")


def carry_template(path: str, where: str, draft: Draft) -> None:
    """Let a chat template of this machine travel along."""
    try:
        draft.files[CHAT_TEMPLATE] = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        draft.refuse(where, f"{shown(path)} cannot be read: {reason}")
    draft.put("data.chat_template", CHAT_TEMPLATE, where)


def _peft(peft: PeftConfig, draft: Draft) -> dict[str, Any]:
    match peft:
        case LoraConfig():
            return _adapter(peft, draft)
        case PrefixConfig():
            draft.origins["adapter.num_virtual_tokens"] = f"{AT}.peft_config.num_virtual_tokens"
            return {"kind": "prefix", "num_virtual_tokens": peft.num_virtual_tokens}
        case AdapterConfig():
            for name in ("adapter_len", "adapter_layers"):
                draft.origins[f"adapter.{name}"] = f"{AT}.peft_config.{name}"
            layers = {} if peft.adapter_layers is None else {"adapter_layers": peft.adapter_layers}
            return {"kind": "adaption_prompt", "adapter_len": peft.adapter_len, **layers}
    assert_never(peft)


def _adapter(lora: LoraConfig, draft: Draft) -> dict[str, Any]:
    at = f"{AT}.peft_config"
    target = _targets(lora, draft)
    adapter: dict[str, Any] = {"kind": "lora", "target": target}
    for name in ("rank", "alpha", "dropout"):
        if (value := getattr(lora, f"lora_{name}")) is not None:
            adapter[name] = value
            draft.origins[f"adapter.{name}"] = f"{at}.lora_{name}"
    if lora.use_dora is not None:
        adapter["dora"] = lora.use_dora
        draft.origins["adapter.dora"] = f"{at}.use_dora"
    if lora.quantize_base:
        adapter["quantize"] = "nf4"
        draft.origins["adapter.quantize"] = f"{at}.quantize_base"
    return adapter


def _targets(lora: LoraConfig, draft: Draft) -> list[str]:
    where = f"{AT}.peft_config.lora_attn_modules"
    named = lora.lora_attn_modules
    if named is None:  # as KEP-2401 leaves it out
        named = LoraConfig().lora_attn_modules or []
    for number, name in enumerate(named):
        if name not in _ATTENTION:
            meant = nearest(name, _ATTENTION)
            remedy = f'did you mean "{meant}"?' if meant else "there are q_proj, k_proj, v_proj and output_proj"
            draft.refuse(f"{where}.{number}", f"{shown(name)} is no projection of attention", remedy)
    target = list(dict.fromkeys(_ATTENTION.get(name, name) for name in named))
    target += ["mlp"] if lora.apply_lora_to_mlp else []
    target += ["unembed"] if lora.apply_lora_to_output else []
    if not target:
        draft.refuse(where, "leaves nothing to adapt", "name a projection, or set apply_lora_to_mlp")
    return target
