"""Which recipe trains a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from luthier.config import RunConfig
from luthier.data.loader import StepBatch
from luthier.errors import ConfigError
from luthier.recipes.run import Resume, Run


class Recipe(Protocol):
    """What every module of a way of training has."""

    def train(self, config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
        """Run a config to its end, or go on with it."""

    def take_step(self, run: Run, batch: StepBatch) -> Mapping[str, float]:
        """One optimizer step on one global batch."""


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that `method` names."""
    match config.method.name:
        case "sft":
            from luthier.recipes import sft

            return sft
        case "pretrain":
            from luthier.recipes import pretrain

            return pretrain
        case "dpo":
            from luthier.recipes import dpo

            return dpo.recipe
        case "orpo":
            from luthier.recipes import orpo

            return orpo.recipe
        case "simpo":
            from luthier.recipes import simpo

            return simpo.recipe
        case "kto":
            from luthier.recipes import kto

            return kto
        case "grpo":
            from luthier.recipes import grpo

            return grpo
        case "reward":
            from luthier.recipes import reward

            return reward
        case "distill":
            from luthier.recipes import distill

            return distill
        case name:
            raise ConfigError(f"{name} cannot train yet", where="method")


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it, by the recipe that its `method` names.

    Args:
        config: what the run is.
        resume: auto goes on from the newest checkpoint in the run directory when there is one, never starts anew, must
            refuses to start without one.

    Returns:
        a summary: steps, tokens, losses, paths. `interrupted` names the signal when one ended the run early.
    """
    return recipe_of(config).train(config, resume=resume)
