"""Direct preference optimisation: `method: dpo`. Step, report and sums over answers are those of `pairs.py`."""

from __future__ import annotations

from typing import Any

import torch

from luthier.config import RunConfig
from luthier.config.methods import DpoConfig
from luthier.data.loader import StepBatch
from luthier.losses.preference import dpo
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
