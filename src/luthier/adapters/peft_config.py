"""`adapter_config.json` of PEFT's LoRA: what of it is understood, what is refused by name, and what is written.

The fields are those of PEFT 0.21 (https://huggingface.co/docs/peft/package_reference/lora); PEFT itself is not needed.
The tensors beside it are read here as well, under their own names.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from luthier.errors import ModelError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
_CHANGES_THE_RESULT = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Ways of initialising that leave the base weights alone; the others (PiSSA, OLoRA, LoftQ, ...) subtract from them."""


@dataclass(frozen=True)
class PeftConfig:
    """What PEFT files say about the adapters in them.

    Attributes:
        directory: where the files lie.
        rank: of layers without a rank of their own.
        alpha: of layers without an alpha of their own.
        alphas: pattern -> alpha.
        dropout: while training.
        rslora: scale by alpha / sqrt(rank).
        dora: there are lengths too.
        targets: names, or one regular expression, or "all-linear"; None when the file does not say.
        parameters: endings of the names of weights of experts that are adapted.
        exclude: names or one regular expression that are never adapted.
        layers: indices of the layers that are adapted; None for all.
        layers_pattern: names of the lists of layers.
        modules: endings of the names of modules that are saved whole.
        ties: what is saved whole of tied weights stays tied.
        tokens: ids whose rows are in the files, or such ids by the name of a module.
    """

    directory: Path
    rank: int
    alpha: float
    alphas: dict[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    targets: Sequence[str] | str | None = None
    parameters: Sequence[str] = ()
    exclude: Sequence[str] | str = ()
    layers: Sequence[int] | None = None
    layers_pattern: Sequence[str] = ()
    modules: Sequence[str] = ()
    ties: bool = False
    tokens: Any = None

    def alpha_of(self, name: str) -> float:
        """alpha of the layer of this full name; a pattern is a regular expression over the end of the name."""
        for pattern, alpha in self.alphas.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return alpha
        return self.alpha

    def saves_whole(self, name: str) -> bool:
        """Whether the module of this full name is in the files as a whole."""
        return any(name.endswith(ending) for ending in self.modules)

    def adapts_parameter(self, name: str) -> bool:
        """Whether PEFT would adapt the parameter of this full name."""
        return any(name == item or name.endswith(f".{item}") for item in self.parameters)

    def adapts(self, name: str) -> bool:
        """Whether PEFT would adapt the linear layer of this full name."""
        if _matches(self.exclude, name):
            return False
        if any(re.match(rf"(^|.*\.){ending}($|\..*)", name) for ending in self.modules):
            return False
        if self.targets is None or not _matches(self.targets, name):
            return False
        if isinstance(self.targets, str) or not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\."]
        found = next((m for pattern in patterns if (m := re.match(rf"{pattern}(\d+)\.", name))), None)
        return found is not None and int(found.group(1)) in self.layers


def _matches(wanted: Sequence[str] | str, name: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == item or name.endswith(f".{item}") for item in wanted)


def read_peft_config(directory: Path) -> PeftConfig:
    """Read `adapter_config.json`.

    Args:
        directory: holds the file, or exactly one directory (PEFT names them after the adapter) that does.

    Raises:
        ModelError: there is none, it is no LoRA, or it uses a part of PEFT that is not supported here; it is named.
    """
    file = find_config(directory)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        kind = raw.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError("it cannot be read as JSON", where=str(file)) from error
    if kind != "LORA":
        raise ModelError(f"it holds an adapter of type {kind}", where=str(file), remedy="only LoRA can be loaded")
    for name in _CHANGES_THE_RESULT:
        if raw.get(name):
            remedy = "merge it into its base with PEFT and start from that model"
            raise ModelError(f"it uses {name}, which is not supported", where=str(file), remedy=remedy)
    if (bias := raw.get("bias", "none")) != "none":
        raise ModelError(f"it trained biases (bias: {bias!r}), which is not supported", where=str(file))
    if (first := raw.get("init_lora_weights", True)) not in _KEEPS_THE_BASE:
        remedy = "convert it with PEFT's path_initial_model_for_weight_conversion"
        raise ModelError(f"its initialisation ({first!r}) changed the base weights", where=str(file), remedy=remedy)
    try:
        return PeftConfig(
            directory=file.parent,
            rank=int(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            alphas={pattern: float(alpha) for pattern, alpha in (raw.get("alpha_pattern") or {}).items()},
            dropout=float(raw.get("lora_dropout") or 0.0),
            rslora=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            targets=raw.get("target_modules"),
            parameters=_listed(raw.get("target_parameters")),
            exclude=raw.get("exclude_modules") or (),
            layers=_listed(raw.get("layers_to_transform")) or None,
            layers_pattern=_listed(raw.get("layers_pattern")),
            modules=_listed(raw.get("modules_to_save")),
            ties=bool(raw.get("ensure_weight_tying")),
            tokens=raw.get("trainable_token_indices"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"a field is missing or of the wrong type ({error})", where=str(file)) from error


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def find_config(directory: Path) -> Path:
    """`adapter_config.json` in a directory, or in the only one in it that has it."""
    if (directory / CONFIG_FILE).is_file():
        return directory / CONFIG_FILE
    inner = sorted(directory.glob(f"*/{CONFIG_FILE}")) if directory.is_dir() else []
    if len(inner) == 1:
        return inner[0]
    if inner:
        names = ", ".join(file.parent.name for file in inner)
        raise ModelError(f"it holds several adapters ({names})", where=str(directory), remedy="name one of them")
    raise ModelError(f"there is no {CONFIG_FILE}", where=str(directory), remedy="name a directory that PEFT has saved")


def other_base(directory: Path, *names: str) -> str | None:
    """The base that the files in a directory name, if that is another than the model of these names.

    Names and paths of one model end alike, whoever has it where: others may be of the same sizes and fit as well.
    """
    raw = json.loads(find_config(directory).read_text(encoding="utf-8"))
    named = str(raw.get("base_model_name_or_path") or "")
    own, *others = (name.rstrip("/").rpartition("/")[2].lower() for name in (named, *names))
    return named if own and own not in others else None


def peft_config_json(
    *,
    ranks: dict[str, int],
    alphas: dict[str, float],
    dropout: float,
    rslora: bool,
    dora: bool,
    modules: Sequence[str],
    names: Iterable[str],
    parameters: Sequence[str],
    ties: bool,
    transposed: bool,
    base_model: str | None,
    revision: str | None,
    tokens: Any = None,
    task: str = "CAUSAL_LM",
) -> str:
    """The text of `adapter_config.json`.

    Args:
        ranks: full name of an adapted layer, or weight of experts -> its rank.
        alphas: the same -> its alpha.
        dropout: while training.
        rslora: scale by alpha / sqrt(rank).
        dora: there are lengths too.
        modules: full names of the modules that are saved whole.
        names: full names of all modules of the model. Targets are written as the last parts of the names where these
            mean the very same layers, as other tools like it, and as full names otherwise.
        parameters: endings of those keys of ranks that are parameters and no layers.
        ties: embedding and head are both saved whole, and are one matrix.
        transposed: the layers keep their weights as GPT-2 does.
        base_model: name or path of the base.
        revision: its revision on the Hub.
        tokens: ids whose rows are saved, or such ids by the name of a module.
        task: what PEFT takes the model for.
    """
    rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
    layers = {name for name in ranks if not any(name == item or name.endswith(f".{item}") for item in parameters)}
    short = sorted({name.rpartition(".")[2] for name in layers})
    by_ending = PeftConfig(Path(), rank, alpha, targets=short, modules=modules)
    targets = short if {name for name in names if by_ending.adapts(name)} == layers else sorted(layers)
    content = _DEFAULTS | {
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: _whole(value) for name, value in alphas.items() if value != alpha},
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "use_dora": dora,
        "target_modules": targets,
        "target_parameters": list(parameters) or None,
        "modules_to_save": list(modules) or None,
        "ensure_weight_tying": ties,
        "fan_in_fan_out": transposed,
        "trainable_token_indices": tokens,
        "task_type": task,
        "base_model_name_or_path": base_model,
        "revision": revision,
    }
    return json.dumps(content, indent=2, sort_keys=True)


def _most_common(values: Iterable[Any]) -> Any:
    listed = list(values)
    return max(dict.fromkeys(listed), key=listed.count)


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Key -> tensor of the weights in a directory of PEFT files.

    Raises:
        ModelError: there are none, or they cannot be read.
    """
    file = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if file is None:
        raise ModelError(f"there is no {WEIGHT_FILES[0]}", where=str(directory), remedy="fetch it again")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return found
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        what = "it is damaged, or holds more than tensors"
        raise ModelError(what, where=str(file), remedy="fetch it again") from error
