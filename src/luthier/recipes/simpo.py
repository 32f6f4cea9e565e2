"""Simple preference optimisation: `method: simpo`. Mean log-probabilities and a margin, no reference."""

from __future__ import annotations

import torch

from luthier.config import RunConfig
from luthier.config.methods import SimpoConfig
from luthier.losses.preference import simpo
from luthier.recipes.pairs import Objective, Pairs, Preference


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


recipe = Preference(objective)
