"""Simple preference optimisation: `method: simpo`. Mean log-probabilities and a margin, no reference."""

from __future__ import annotations

from typing import Any

import torch

from luthier.config import RunConfig
from luthier.config.methods import SimpoConfig
from luthier.data.loader import StepBatch
from luthier.losses.preference import simpo
from luthier.recipes import pairs
from luthier.recipes.loop import finish, loop
from luthier.recipes.pairs import Compared, Objective, Pairs
from luthier.recipes.run import Resume, Run, opened


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it; as of `sft.train`."""
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on one global batch of pairs."""
    return pairs.take_step(run, batch, objective(run.config))


def measure(run: Run) -> Compared:
    """Loss and rewards of the held-out pairs now."""
    return pairs.measure(run, objective(run.config))


def objective(config: RunConfig) -> Objective:
    """The loss of a config, and beta x mean log-probability as the reward of an answer."""
    method = config.method
    assert isinstance(method, SimpoConfig)

    def losses(found: Pairs) -> torch.Tensor:
        smoothing = method.label_smoothing
        return simpo(*found.means, beta=method.beta, gamma=method.gamma, label_smoothing=smoothing)

    def rewards(found: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = found.means
        return method.beta * chosen, method.beta * rejected

    return Objective(losses, rewards, cross_entropy=method.cross_entropy)
