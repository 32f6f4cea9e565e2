"""`tune run`, as Kubeflow's SDK and Trainer call it for a BuiltinTrainer: `python -m luthier.jobs.tune run ...`.

Their words are torchtune's: a recipe, `--config MODEL_RECIPE`, then `key=value`, where values are as Python prints
them. Here they are read back into a `TorchTuneConfig`, which becomes a run as it would if it had come by our own SDK;
recipe and config say nothing besides the model, since whether there is an adapter shows in the values. (Kubeflow takes
the recipe of a full fine-tune for a LoRA of the feed-forward layers alone.)
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luthier.config.faults import raise_all, shown
from luthier.config.presets import presets
from luthier.config.suggest import nearest
from luthier.errors import EXIT_USER_ERROR, ConfigError, UserError
from luthier.jobs import node
from luthier.jobs.asked import Asked
from luthier.jobs.build import build
from luthier.jobs.runtimes import PREFIX, builtin, find
from luthier.jobs.spec import JobSpec
from luthier.jobs.trainers import BuiltinTrainer, LoraConfig, TorchTuneConfig, TorchTuneInstructDataset
from luthier.jobs.types import UNKNOWN
from luthier.jobs.wire import node_job

_INSTRUCT = "torchtune.datasets.instruct_dataset"
_WORKSPACE = "/workspace/"


def _word(text: str) -> str:
    return text


def _python(kind: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Reads what Python prints of a value, of one type."""

    def read(text: str) -> Any:
        value = ast.literal_eval(text)
        wanted: Any = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError
        return value

    return read


def _list(text: str) -> list[str]:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError
    return [part.strip() for part in text[1:-1].split(",") if part.strip()]


_RUN: dict[str, Callable[[str], Any]] = {
    "dtype": _word,
    "batch_size": _python(int),
    "epochs": _python(float),
    "loss": _word,
}
_LORA: dict[str, Callable[[str], Any]] = {
    "apply_lora_to_mlp": _python(bool),
    "apply_lora_to_output": _python(bool),
    "lora_attn_modules": _list,
    "lora_rank": _python(int),
    "lora_alpha": _python(float),
    "lora_dropout": _python(float),
    "quantize_base": _python(bool),
    "use_dora": _python(bool),
}
_DATASET: dict[str, Callable[[str], Any]] = {
    "source": _word,
    "split": _word,
    "train_on_input": _python(bool),
    "new_system_prompt": _word,
    "column_map": _python(dict),
}
_PLACES = ("output_dir", "tokenizer.path", "tokenizer.merges_file", "checkpointer.checkpoint_dir")
"""Keys that say where things are, which is the same in every workspace of ours."""
_DATA = ("dataset.data_dir", "dataset.data_files")
_KEYS = [
    *_RUN,
    *(f"model.{key}" for key in _LORA),
    "dataset",
    *(f"dataset.{key}" for key in _DATASET),
    *_DATA,
    *_PLACES,
]


@dataclass
class Words:
    """What a command line says.

    Attributes:
        preset: of the model.
        config: all parameters.
        data: where the rows are, below the workspace; None for where the data set is by itself.
        meeting: host and port where nodes meet; None for what the environment says.
    """

    preset: str
    config: TorchTuneConfig
    data: str | None = None
    meeting: tuple[str, str] | None = None


@dataclass
class _Read:
    run: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    errors: list[ConfigError] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """Be a node that does what `tune` is told; returns what to leave with."""
    try:
        words = parsed(arguments)
        spec = spec_of(words, os.environ)
        os.environ[node.JOB] = json.dumps(node_job(spec, with_files=True))
        if words.meeting is not None:
            os.environ["PET_MASTER_ADDR"], os.environ["PET_MASTER_PORT"] = words.meeting
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return node.main()


def parsed(arguments: Sequence[str]) -> Words:
    """Read a command line.

    Raises:
        ConfigError: all that is wrong, a sentence for each.
    """
    model = meeting = None
    read = _Read()
    rest = list(arguments)
    if not rest or rest.pop(0) != "run":
        raise ConfigError("there is no such command", where="tune", remedy="tune run is all that there is")
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.partition("=")
        if key == "--rdzv_endpoint":
            host, _, port = text.rpartition(":")
            meeting = (host, port)
        elif argument == "--config" and rest:
            model = rest.pop(0)
        elif argument.startswith("-"):
            read.errors.append(ConfigError("is no option that Kubeflow gives", where=f"tune: {argument}"))
        elif equals:
            _take(key, text, read)
    preset = _preset(model, read.errors)
    raise_all(read.errors)
    config = TorchTuneConfig(**read.run)
    if read.lora:
        config.peft_config = LoraConfig(**{"lora_attn_modules": [], **read.lora})
    if read.dataset:
        config.dataset_preprocess_config = TorchTuneInstructDataset(**read.dataset)
    return Words(preset, config, read.data, meeting)


def _take(key: str, text: str, read: _Read) -> None:
    section, _, name = key.partition(".")
    known, values = {"model": (_LORA, read.lora), "dataset": (_DATASET, read.dataset)}.get(section, (_RUN, read.run))
    name = name if section in ("model", "dataset") else key
    if key in _PLACES:
        return
    if key in _DATA:
        read.data = text.removeprefix(_WORKSPACE)
    elif key == "dataset":
        if text != _INSTRUCT:
            read.errors.append(ConfigError(f"{shown(text)} is not {_INSTRUCT}", where="tune: dataset"))
    elif name not in known:
        meant = nearest(key, _KEYS)
        remedy = f"did you mean {meant}?" if meant else None
        read.errors.append(ConfigError("is no key that Kubeflow's SDK writes", where=f"tune: {key}", remedy=remedy))
    else:
        try:
            values[name] = known[name](text)
        except (ValueError, SyntaxError):
            read.errors.append(ConfigError(f"cannot be read from {shown(text)}", where=f"tune: {key}"))


def _preset(model: str | None, errors: list[ConfigError]) -> str:
    """The row of the catalogue that `--config llama3_2/1B_full` means."""
    if model is None:
        errors.append(ConfigError("is missing", where="tune: --config", remedy="name a model, as llama3_2/1B_full"))
        return ""
    family, _, size = model.partition("/")
    name = f"{family.replace('_', '.')}-{size.partition('_')[0].lower()}"
    if name not in presets():
        errors.append(ConfigError(f"there is no model for {shown(model)}", where="tune: --config"))
    return name


def spec_of(words: Words, environment: Mapping[str, str]) -> JobSpec:
    """The job that a command line means, checked as one that our own SDK is asked for.

    Args:
        words: of the command line.
        environment: says how many nodes and processes there are.

    Raises:
        ConfigError: all that is wrong, a sentence for each.
    """
    runtime = find(PREFIX + words.preset, builtin("gpu"))
    assert runtime.trainer is not None
    runtime.trainer.num_nodes = int(environment.get("PET_NNODES", 1))
    processes = environment.get("PET_NPROC_PER_NODE", "")
    runtime.trainer.device_count = int(processes) if processes.isdigit() else UNKNOWN
    spec = build(Asked("kubernetes", [runtime], runtime.name, trainer=BuiltinTrainer(words.config)))
    if words.data is not None:
        assert spec.config is not None
        source = spec.config["data"]["train"][0]
        source["path"] = words.data.removesuffix("/.")
        if words.config.dataset_preprocess_config is None:
            source.pop("format", None)  # the catalogue speaks of its own data set
    return spec


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
