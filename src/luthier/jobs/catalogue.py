"""Recipes and configs of the catalogue of models, as `luthier ls`, `cat` and `cp` show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from luthier.config.presets import GPUS_A_NODE, Method, Preset, presets
from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.jobs.select import Selection, select

METHODS: tuple[Method, ...] = ("full", "lora")
RECIPE_SOURCE = "luthier.recipes.sft"
"""The module that every recipe of the table is: adapters and layouts are config."""


def selections() -> Iterator[Selection]:
    """Every recipe with every config that it takes, recipe by recipe."""
    trained = [preset for preset in presets().values() if not preset.pictures]
    for method in METHODS:
        for processes in (1, GPUS_A_NODE):
            for preset in trained:
                yield select(method, 1, processes, preset.name)


def recipes() -> list[str]:
    """Names of the recipes."""
    return list(dict.fromkeys(selection.recipe for selection in selections()))


def run_of(name: str, gpus: int | None = None) -> dict[str, Any]:
    """A config of the catalogue as a run's YAML has it: it starts as it stands, with `luthier train`.

    Args:
        name: "llama3.2-1b/lora_single_device"; "llama3.2-1b" alone is its full fine-tune.
        gpus: how many processes it is for; where left out, one of a single device, else as many as the model takes.

    Raises:
        ConfigError: there is no such config, or it cannot be trained yet.
    """
    preset, method, single = _parsed(name)
    if single and gpus not in (None, 1):
        raise ConfigError(f"is for one process, not {gpus}", where=name, remedy=f"take {preset.name}/{method}")
    ranks = 1 if single else gpus if gpus is not None else max(2, preset.gpus(method))
    config = preset.config(method, ranks)
    run: dict[str, Any] = {"model": preset.model}
    run["data"] = {"train": {"path": f"hf://{preset.dataset}", "format": preset.format}, **config["data"]}
    if method == "lora":
        run["adapter"] = {"kind": "lora", "rank": 16, "alpha": 32, "target": ["attn", "mlp"]}
    run["optimizer"] = {"name": "adamw", **config["optimizer"]}
    run["train"] = {"epochs": 1, **config["train"], "precision": "bf16"}
    if ranks > 1:
        run["parallel"] = config.get("parallel", {"dp_shard": -1})
    return run | {"output": f"runs/{preset.name}-{method}"}


def _parsed(name: str) -> tuple[Preset, Method, bool]:
    model, _, config = name.lower().removeprefix("luthier-").partition("/")
    method: Literal["full", "lora"] = "lora" if config.startswith("lora") else "full"
    known = [selection.config for selection in selections()]
    if model not in presets() or config not in ("", method, f"{method}_single_device"):
        meant = nearest(name, [*known, *presets(), *recipes()])
        remedy = f"did you mean {meant}?" if meant else "`luthier ls` lists those there are"
        raise ConfigError("there is no recipe or config of this name", where=name, remedy=remedy)
    preset = presets()[model]
    if preset.pictures:
        what = f"{preset.model} reads pictures, and the catalogue has no layout for it"
        raise ConfigError(what, where=name, remedy="name a model of text alone")
    return preset, method, config.endswith("_single_device")
