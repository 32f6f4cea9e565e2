"""Direct preference optimisation: `method: dpo`. Step, report and sums over answers are those of `pairs.py`."""

from __future__ import annotations

import torch

from luthier.config import RunConfig
from luthier.config.methods import DpoConfig
from luthier.losses.preference import dpo
from luthier.recipes.pairs import Objective, Pairs, Preference


def objective(config: RunConfig) -> Objective:
    """The loss of a config, and beta log pi / ref as the reward of an answer."""
    method = config.method
    assert isinstance(method, DpoConfig)

    def losses(found: Pairs) -> torch.Tensor:
        chosen, rejected = found.gains
        return dpo(
            chosen,
            rejected,
            beta=method.beta,
            loss=method.loss,
            label_smoothing=method.label_smoothing,
            lengths=(found.chosen_tokens, found.rejected_tokens),
        )

    def rewards(found: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = found.gains
        return method.beta * chosen, method.beta * rejected

    return Objective(losses, rewards, needs_reference=True, cross_entropy=method.cross_entropy)


recipe = Preference(objective)
