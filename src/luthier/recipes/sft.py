"""Supervised fine-tuning: `luthier train`. Read it and `loop.py` from top to bottom and you have seen a fine-tune."""

from __future__ import annotations

from typing import Any

from luthier.config import RunConfig
from luthier.data.loader import StepBatch
from luthier.engine.evaluate import Evaluation, evaluate
from luthier.engine.step import forward_backward_all
from luthier.recipes.loop import finish, loop, noted, update
from luthier.recipes.run import Resume, Run, opened
from luthier.recipes.setup import held_out_batches
from luthier.report.progress import stage


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it.

    Args:
        config: what the run is.
        resume: auto goes on from the newest checkpoint in the run directory when there is one, never starts anew, must
            refuses to start without one.

    Returns:
        a summary: steps, tokens, losses, paths. `interrupted` names the signal when one ended the run early.
    """
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on one global batch: the sum of weighted token losses / the sum of weights over all of it.

    Returns:
        loss (nats a token), gradient_norm and learning_rate.

    Raises:
        NonFiniteError: as of `update`.
    """
    share = 1 / batch.total_weight if batch.total_weight else 0.0
    outputs = forward_backward_all(run.state, [microbatch.scaled(share) for microbatch in batch.microbatches])
    return update(run, batch, outputs)


def measure(run: Run) -> Evaluation:
    """The validation loss now, noted in the run's course."""
    assert run.held_out is not None
    batches = held_out_batches(run.state, run.held_out, run.config)
    with stage("evaluating") as told:
        rows = len(run.held_out)
        result = evaluate(run.state, batches, progress=lambda done: told(done, rows))
    noted(run, result)
    return result
