"""The kinds of adapters behind one door: put in place, finished, saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from luthier.adapters.learned import LearnedReport, apply_learned, finish_learned
from luthier.adapters.learned_files import kind_of_files, save_learned
from luthier.adapters.lora import LoraReport, apply_lora, finish_lora
from luthier.adapters.peft_save import save_peft as save_lora
from luthier.adapters.prompt import learned
from luthier.adapters.rows import NewTokens
from luthier.config.adapters import AdapterConfig, AdaptionPromptConfig, PrefixConfig, PromptConfig
from luthier.config.sections import LoraConfig
from luthier.hf.together import Group

AdapterReport = LoraReport | LearnedReport


def apply_adapter(model: Any, config: AdapterConfig, seed: int = 0, tokens: NewTokens | None = None) -> AdapterReport:
    """As `apply_lora`, of whatever kind the config names."""
    if isinstance(config, LoraConfig):
        return apply_lora(model, config, seed, tokens)
    return apply_learned(model, config, seed)


def finish_adapter(
    model: Any,
    config: AdapterConfig,
    seed: int = 0,
    *,
    run: Callable[[], object] | None = None,
    part: bool = False,
) -> AdapterReport:
    """As `finish_lora`, of whatever kind the config names."""
    if isinstance(config, LoraConfig):
        return finish_lora(model, config, seed, run=run, part=part)
    return finish_learned(model, config, seed)


def adapter_of_files(directory: Path) -> AdapterConfig:
    """The config of an adapter that is just what PEFT files hold."""
    start = str(directory)
    match kind_of_files(directory):
        case "prompt":
            return PromptConfig(kind="prompt", start_from=start)
        case "prefix":
            return PrefixConfig(kind="prefix", start_from=start)
        case "adaption_prompt":
            return AdaptionPromptConfig(kind="adaption_prompt", start_from=start)
        case _:
            return LoraConfig(start_from=start)


def save_peft(
    model: Any,
    directory: str | Path,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    group: Group | None = None,
) -> Path:
    """Write a model's adapters, of whatever kind, as PEFT does.

    Args:
        model: adapters in place; whole, or what this rank holds of it.
        directory: made if it is not there.
        base_model: name or path of the base, for whoever loads the files.
        revision: its revision on the Hub.
        group: all ranks that hold parts of the model, all of which call this; None where this process holds it whole.

    Returns:
        the directory.

    Raises:
        ModelError: the model carries no adapters.
    """
    save = save_learned if learned(model) else save_lora
    return save(model, directory, base_model=base_model, revision=revision, group=group)
