"""Supervised fine-tuning: `luthier train`. Read it from top to bottom and you have seen a fine-tune."""

from __future__ import annotations

import logging
import math
import signal
from typing import Any, Literal

import torch

from luthier.config import RunConfig
from luthier.data.loader import StepBatch, StreamRows
from luthier.engine.evaluate import Evaluation, evaluate
from luthier.engine.guards import bad_rows, first_bad_weight, non_finite_error
from luthier.engine.step import forward_backward_all, optim_step
from luthier.launch import STEP_TIMEOUT, GarbageCollection, any_rank, set_timeout, unhurried
from luthier.optim.schedules import factor
from luthier.recipes.export import export_state
from luthier.recipes.run import Resume, Run, opened, save
from luthier.recipes.setup import held_out_batches
from luthier.report.profile import Profiler
from luthier.report.progress import stage

logger = logging.getLogger(__name__)

MOST_SKIPS = 10
"""Steps in a row that may be skipped for not being finite; after as many a run does not come back by itself."""


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
        loop(run)
        return finish(run)


def loop(run: Run) -> None:
    """The training loop."""
    config, state = run.config, run.state
    if enough(run):  # stopped early already: the same command must not train on
        return
    with (
        run.interruption.deferred(),
        GarbageCollection() as garbage,
        Profiler(config.train.profile, run.directory.profile) as profiler,
    ):
        for batch in run.loader:
            with profiler.step(state.counters.step + 1):
                measured = take_step(run, batch)
            set_timeout(STEP_TIMEOUT)
            garbage.step(state.counters.step)
            run.report.step(state.counters, batch, measured)
            last = state.counters.step == run.total
            if run.held_out is not None and (last or due(config.evaluation.every, state.counters.step)):
                run.report.validation(state.counters.step, measure(run))
            stop = asked_to_stop(run) or enough(run)
            if last or stop or due(config.checkpoint.every, state.counters.step) or best_now(run):
                save(run)
            if stop:
                break


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on one global batch.

    Returns:
        loss (nats a token), gradient_norm and learning_rate.

    Raises:
        NonFiniteError: loss or gradient is not finite, and train.on_non_finite says stop, or a weight is not, or the
            last ten steps were skipped.
    """
    config, state = run.config, run.state
    factor_of_weights = 1 / batch.total_weight if batch.total_weight else 0.0
    outputs = forward_backward_all(state, [microbatch.scaled(factor_of_weights) for microbatch in batch.microbatches])
    total = torch.stack([output.loss for output in outputs]).sum()
    loss = float(total if state.mesh is None else state.mesh.sum(total))
    rate = factor(state.counters.step, run.total, config.schedule)
    update = optim_step(state, loss=loss, learning_rate_factor=rate, max_gradient_norm=config.train.max_gradient_norm)
    state.counters.rows += batch.rows
    state.counters.tokens += batch.tokens
    state.counters.trained_tokens += batch.trained_tokens
    run.course.loss = loss
    run.course.skips = 0 if update.applied else run.course.skips + 1
    if not update.applied:
        weight = first_bad_weight(state.model)
        error = non_finite_error(
            state.counters.step,
            loss=loss,
            norm=update.gradient_norm,
            gradient=update.bad_gradient,
            weight=weight,
            rows=[
                row
                for microbatch, output in zip(batch.microbatches, outputs, strict=True)
                for row in bad_rows(microbatch, output.logprobs)
            ],
        )
        hopeless = weight is not None or run.course.skips >= MOST_SKIPS  # no later step would be any better
        if config.train.on_non_finite == "stop" or hopeless:
            raise error
        logger.warning("step skipped: %s", error)
    measured = {"loss": loss, "gradient_norm": update.gradient_norm}
    if state.balance is not None and state.balance.coefficient:
        measured["aux_loss"] = state.balance.auxiliary
    return {**measured, "learning_rate": rate * config.optimizer.learning_rate}


def measure(run: Run) -> Evaluation:
    """The validation loss now, and what it means for the best and for stopping early."""
    assert run.held_out is not None
    config, state, course = run.config, run.state, run.course
    batches = held_out_batches(state, run.held_out, config)
    with stage("evaluating") as told:
        rows = len(run.held_out)
        result = evaluate(state, batches, progress=lambda done: told(done, rows))
    course.validation = {"step": state.counters.step, **result.to_dict()}
    # A loss that is not finite is never the best: nothing would ever be lower than NaN.
    if math.isfinite(result.loss) and (course.best_loss is None or result.loss < course.best_loss):
        course.best_loss, course.best_step, course.waited = result.loss, state.counters.step, 0
    else:
        course.waited += 1
    return result


def finish(run: Run) -> dict[str, Any]:
    """Wait for the last checkpoint, export what a finished run has learnt, and sum up."""
    run.checkpoints.wait()
    if isinstance(run.rows, StreamRows):  # what other rows have been through was told before the first step
        for line in run.rows.report.lines():
            logger.info("%s", line)
    counters, course = run.state.counters, run.course
    summary: dict[str, Any] = {
        "output": str(run.directory.path),
        "steps": counters.step,
        "steps_total": run.total,
        "skipped_steps": counters.skipped_steps,
        "tokens": counters.tokens,
        "trained_tokens": counters.trained_tokens,
        "loss": course.loss,
        "validation": course.validation,
        "best": {"step": course.best_step, "loss": course.best_loss} if course.best_step is not None else None,
        "stopped_early": enough(run),
        "interrupted": signal.Signals(run.interruption.signal).name if run.interruption.signal is not None else None,
        "data": run.data,
    }
    if run.interruption.signal is None:
        form: Literal["merge", "adapter"] = "adapter" if run.state.lora is not None else "merge"
        measured = {"loss": course.loss, "validation": course.validation}
        with stage("exporting"), unhurried():
            summary |= export_state(run.config, run.state, run.stop_ids, run.directory.export, form, measured)
    return summary


def asked_to_stop(run: Run) -> bool:
    """Whether a signal has come, to whichever rank: all stop after the same step."""
    run.interruption.signal = any_rank(run.interruption.signal or 0) or None
    return run.interruption.signal is not None


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def best_now(run: Run) -> bool:
    """Whether this very step has the lowest validation loss so far, and its checkpoint is to be kept."""
    return run.config.checkpoint.keep_best and run.course.best_step == run.state.counters.step


def enough(run: Run) -> bool:
    """Whether the validation loss has not fallen for long enough to stop early."""
    patience = run.config.evaluation.early_stopping
    return patience is not None and run.course.waited >= patience
