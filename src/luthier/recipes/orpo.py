"""Odds-ratio preference optimisation: `method: orpo`. Cross-entropy of the chosen answers + beta x odds ratio."""

from __future__ import annotations

import torch

from luthier.config import RunConfig
from luthier.config.methods import OrpoConfig
from luthier.losses.preference import odds_ratio
from luthier.recipes.pairs import Objective, Pairs, Preference


def objective(config: RunConfig) -> Objective:
    """The loss of a config, and beta x mean log-probability as the reward of an answer."""
    method = config.method
    assert isinstance(method, OrpoConfig)

    def losses(found: Pairs) -> torch.Tensor:
        return method.beta * odds_ratio(*found.means)

    def rewards(found: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = found.means
        return method.beta * chosen, method.beta * rejected

    return Objective(losses, rewards, cross_entropy=1.0, train_on_prompt=method.train_on_prompt)


recipe = Preference(objective)
