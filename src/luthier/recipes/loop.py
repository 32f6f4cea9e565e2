"""What all ways of training share: the loop over global batches, what follows a backward pass, and the end of a run.

A recipe says what one step minimises (`take_step`) and what is measured on held-out rows (`measure`), and calls `loop`
with the two and then `finish`.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from luthier.data.loader import StepBatch, StreamRows
from luthier.engine.guards import bad_rows, first_bad_weight, non_finite_error
from luthier.engine.step import ForwardBackward, optim_step, set_learning_rate
from luthier.hf.together import exchange
from luthier.launch import STEP_TIMEOUT, GarbageCollection, any_rank, set_timeout, unhurried
from luthier.optim.schedules import factor
from luthier.recipes.export import export_state, own_base
from luthier.recipes.run import Run, save
from luthier.report.profile import Profiler
from luthier.report.progress import stage

logger = logging.getLogger(__name__)

MOST_SKIPS = 10
"""Steps in a row that may be skipped for not being finite; after as many a run does not come back by itself."""


class Measured(Protocol):
    """What was measured on held-out rows (`engine.evaluate.Evaluation`)."""

    @property
    def loss(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    def to_dict(self) -> dict[str, Any]: ...


TakeStep = Callable[[Run, StepBatch], Mapping[str, float]]
Measure = Callable[[Run], Measured]


def loop(run: Run, take_step: TakeStep, measure: Measure) -> None:
    """The training loop.

    Args:
        run: ready for its next step.
        take_step: one optimizer step on one global batch; gives what was measured on the way.
        measure: the validation loss now, and what it means for the best and for stopping early (`noted`).
    """
    config, state = run.config, run.state
    if enough(run):  # stopped early already: the same command must not train on
        return
    with (
        run.interruption.deferred(),
        GarbageCollection() as garbage,
        Profiler(config.train.profile, run.directory.profile) as profiler,
    ):
        for batch in run.loader:
            set_learning_rate(state, factor(state.counters.step, run.total, config.schedule))
            with profiler.step(state.counters.step + 1):
                measured = take_step(run, batch)
            set_timeout(STEP_TIMEOUT)
            garbage.step(state.counters.step)
            run.report.step(state.counters, run.taken or batch, measured)
            last = state.counters.step == run.total
            if run.held_out is not None and (last or due(config.evaluation.every, state.counters.step)):
                run.report.validation(state.counters.step, measure(run))
            stop = asked_to_stop(run) or enough(run)
            if last or stop or due(config.checkpoint.every, state.counters.step) or best_now(run):
                save(run)
            if stop:
                break


def update(
    run: Run, batch: StepBatch, outputs: Sequence[ForwardBackward], *, ends_step: bool = True
) -> dict[str, float]:
    """New weights from the gradients of a global batch, and the counting that belongs to a step.

    Args:
        run: whose weights change.
        batch: the global batch, or this rank's part of it.
        outputs: what `forward_backward_all` gave for its microbatches.
        ends_step: off: another update of the same step is to come, and nothing is counted yet.

    Returns:
        loss, gradient_norm and learning_rate.

    Raises:
        NonFiniteError: loss or gradient is not finite, and train.on_non_finite says stop, or a weight is not, or the
            last ten steps were skipped.
    """
    config, state = run.config, run.state
    total = torch.stack([output.loss for output in outputs]).sum()
    loss = float(total if state.mesh is None else state.mesh.sum(total))
    rate = factor(state.counters.step, run.total, config.schedule)
    done = optim_step(
        state,
        loss=loss,
        learning_rate_factor=rate,
        max_gradient_norm=config.train.max_gradient_norm,
        counts=ends_step,
    )
    run.taken = batch
    if ends_step:
        state.counters.rows += batch.rows
        state.counters.tokens += batch.tokens
        state.counters.trained_tokens += batch.trained_tokens
    run.course.loss = loss
    run.course.skips = 0 if done.applied else run.course.skips + 1
    if not done.applied:
        found = [
            row
            for microbatch, output in zip(batch.microbatches, outputs, strict=True)
            for row in bad_rows(microbatch, output.logprobs)
        ]
        # Each rank sees its own rows and its own parts of weights; all decide alike, or some would wait for others.
        group = dist.group.WORLD if state.mesh is not None else None
        weights, gradients, rows = zip(
            *exchange((first_bad_weight(state.model), done.bad_gradient, found), group), strict=True
        )
        weight = next((name for name in weights if name is not None), None)
        error = non_finite_error(
            state.counters.step,
            loss=loss,
            norm=done.gradient_norm,
            gradient=next((name for name in gradients if name is not None), None),
            weight=weight,
            rows=list(dict.fromkeys(row for part in rows for row in part)),
        )
        hopeless = weight is not None or run.course.skips >= MOST_SKIPS  # no later step would be any better
        if config.train.on_non_finite == "stop" or hopeless:
            raise error
        logger.warning("step skipped: %s", error)
    measured = {"loss": loss, "gradient_norm": done.gradient_norm}
    if state.balance is not None and state.balance.coefficient:
        measured["aux_loss"] = state.balance.auxiliary
    return {**measured, "learning_rate": rate * config.optimizer.learning_rate}


def noted(run: Run, result: Measured) -> None:
    """What a measurement means for the best checkpoint and for stopping early."""
    assert run.held_out is not None
    course, step = run.course, run.state.counters.step
    course.measured_on = run.held_out.fingerprint
    course.validation = {"step": step, **result.to_dict()}
    # A loss that is not finite is never the best: nothing would ever be lower than NaN.
    if math.isfinite(result.loss) and (course.best_loss is None or result.loss < course.best_loss):
        course.best_loss, course.best_step, course.waited = result.loss, step, 0
    else:
        course.waited += 1


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
        alone = run.state.lora is not None and not own_base(run.config)
        form: Literal["merge", "adapter"] = "adapter" if alone else "merge"
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
