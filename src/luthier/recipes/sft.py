"""Supervised fine-tuning: `luthier train`. Read it from top to bottom and you have seen a fine-tune."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from luthier.config import RunConfig
from luthier.data.loader import Loader, LoaderState, Rows, StepBatch, StreamRows, iterate_once
from luthier.engine import randomness
from luthier.engine.checkpoint import Checkpointer, check_unchanged, read_record, reading
from luthier.engine.evaluate import Evaluation, evaluate
from luthier.engine.guards import bad_rows, first_bad_weight, non_finite_error
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward, optim_step
from luthier.errors import CheckpointError, ConfigError
from luthier.hf.save import remove_leftovers
from luthier.optim.schedules import factor
from luthier.recipes.export import export_state, trainable_only
from luthier.recipes.run_directory import Interruption, RunDirectory
from luthier.recipes.setup import identity, prepare_process, rows_of, state_of, tokenizer_of
from luthier.report.profile import Profiler
from luthier.report.progress import stage
from luthier.report.reporter import Reporter, run_log

logger = logging.getLogger(__name__)

Resume = Literal["auto", "never", "must"]


@dataclass
class Course:
    """What the recipe itself remembers from step to step; part of every checkpoint."""

    validation: dict[str, Any] | None = None
    """The newest measurement."""
    best_loss: float | None = None
    best_step: int | None = None
    waited: int = 0
    """Measurements in a row without a lower loss."""
    loss: float | None = None
    """Of the newest step."""


@dataclass
class Run:
    """Everything that a training run works with."""

    config: RunConfig
    directory: RunDirectory
    state: TrainState
    loader: Loader
    held_out: Rows | None
    checkpoints: Checkpointer
    stop_ids: list[int]
    of: dict[str, Any]
    rows: Rows | StreamRows
    total: int
    """Optimizer steps of the whole run."""
    interruption: Interruption
    report: Reporter = field(init=False)
    random_states: dict[str, Any] | None = None
    """Of the checkpoint that the run goes on from."""
    course: Course = field(default_factory=Course)

    @property
    def data(self) -> dict[str, Any]:
        """What became of the rows: of a stream, of those that have been read so far."""
        return self.rows.report.to_dict()


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


@contextmanager
def opened(config: RunConfig, resume: Resume) -> Iterator[Run]:
    """A run ready for its next step; while it is open it owns its directory and minds SIGTERM."""
    directory = RunDirectory(config.output)
    with directory.locked(), run_log(directory.log), Interruption() as interruption:
        run = open_run(config, directory, resume, interruption)
        directory.write_config(config)
        with Reporter(directory.path, config, run.state, run.total) as run.report:
            # Last of all, so that nothing that was drawn while setting up counts.
            if run.random_states is None:
                randomness.seed_everything(config.seed)
            else:
                randomness.restore(run.random_states)
            try:
                yield run
            finally:
                # Before the directory is anybody else's, who would take a checkpoint in the making for a leftover.
                run.checkpoints.join()


def open_run(config: RunConfig, directory: RunDirectory, resume: Resume, interruption: Interruption) -> Run:
    """Load data and model, and go on from the newest checkpoint if that is wanted."""
    device = prepare_process(config)
    tokenizer = tokenizer_of(config)
    rows, held_out = rows_of(config, tokenizer)
    for line in rows.report.lines() if isinstance(rows, Rows) else ():
        logger.info("%s", line)
    if held_out is not None and config.data.validation:
        for line in held_out.report.lines():
            logger.info("validation: %s", line)
    with stage("loading the model"):
        state = state_of(config, device)
    state.tokenizer = tokenizer
    full = f"full fine-tuning of {sum(p.numel() for p in state.trainable.values()):,} parameters"
    logger.info("%s", state.lora or full)
    data = config.data
    positions = state.limits.positions if state.limits is not None else None
    if positions is not None and isinstance(rows, Rows) and int(rows.lengths.max()) > positions:
        raise ConfigError(
            f"there are rows of {int(rows.lengths.max()):,} tokens, and the model has {positions:,} positions",
            where="data.sequence_length",
            remedy=f"set it to {positions} or less",
        )
    if data.packing and state.packing_fault:
        logger.warning("packing is off: %s", state.packing_fault)
        data = data.model_copy(update={"packing": False})
    loader = Loader(rows, data, config.train, seed=config.seed)
    run = Run(
        config=config,
        directory=directory,
        state=state,
        loader=loader,
        held_out=held_out,
        checkpoints=Checkpointer(
            directory.checkpoints,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
            trainable_only=trainable_only(config),
            asynchronous=config.checkpoint.asynchronous,
        ),
        stop_ids=list(rows.stop_ids),
        of=identity(config, state),
        rows=rows,
        interruption=interruption,
        total=loader.steps_total(),
    )
    run.checkpoints.tidy()
    remove_leftovers(directory.export)
    newest = run.checkpoints.latest()
    if newest is not None and resume != "never":
        go_on(run, newest)
    elif resume == "must":
        raise CheckpointError("there is no checkpoint to go on from", where=str(directory.checkpoints))
    elif newest is not None:
        run.checkpoints.clear()
    return run


def loop(run: Run) -> None:
    """The training loop."""
    config, state = run.config, run.state
    if enough(run):  # stopped early already: the same command must not train on
        return
    with run.interruption.deferred(), Profiler(config.train.profile, run.directory.profile) as profiler:
        for batch in run.loader:
            with profiler.step(state.counters.step + 1):
                measured = take_step(run, batch)
            run.report.step(state.counters, batch, measured)
            last = state.counters.step == run.total
            if run.held_out is not None and (last or due(config.evaluation.every, state.counters.step)):
                run.report.validation(state.counters.step, measure(run))
            stop = run.interruption.signal is not None or enough(run)
            if last or stop or due(config.checkpoint.every, state.counters.step) or best_now(run):
                save(run)
            if stop:
                break


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on one global batch.

    Returns:
        loss (nats a token), gradient_norm and learning_rate.

    Raises:
        NonFiniteError: loss or gradient is not finite, and train.on_non_finite says stop, or a weight is not.
    """
    config, state = run.config, run.state
    factor_of_weights = 1 / batch.total_weight if batch.total_weight else 0.0
    outputs = [forward_backward(state, microbatch.scaled(factor_of_weights)) for microbatch in batch.microbatches]
    loss = float(torch.stack([output.loss for output in outputs]).sum())
    rate = factor(state.counters.step, run.total, config.schedule)
    update = optim_step(state, loss=loss, learning_rate_factor=rate, max_gradient_norm=config.train.max_gradient_norm)
    state.counters.rows += batch.rows
    state.counters.tokens += batch.tokens
    state.counters.trained_tokens += batch.trained_tokens
    run.course.loss = loss
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
        if config.train.on_non_finite == "stop" or weight is not None:  # no later step would be any better
            raise error
        logger.warning("step skipped: %s", error)
    return {"loss": loss, "gradient_norm": update.gradient_norm, "learning_rate": rate * config.optimizer.learning_rate}


def measure(run: Run) -> Evaluation:
    """The validation loss now, and what it means for the best and for stopping early."""
    assert run.held_out is not None
    config, state, course = run.config, run.state, run.course
    batches = iterate_once(
        run.held_out, config.data.sequence_length, packing=config.data.packing and not state.packing_fault
    )
    with stage("evaluating") as told:
        rows = len(run.held_out)
        result = evaluate(state.model, state.head, batches, state.device, progress=lambda done: told(done, rows))
    course.validation = {"step": state.counters.step, **result.to_dict()}
    # A loss that is not finite is never the best: nothing would ever be lower than NaN.
    if math.isfinite(result.loss) and (course.best_loss is None or result.loss < course.best_loss):
        course.best_loss, course.best_step, course.waited = result.loss, state.counters.step, 0
    else:
        course.waited += 1
    return result


def save(run: Run) -> None:
    """Write a checkpoint of this moment."""
    validation = run.course.validation
    score = None
    if validation is not None and validation["step"] == run.state.counters.step and math.isfinite(validation["loss"]):
        score = validation["loss"]
    record = {
        "loader": run.loader.state.to_dict(),
        "of": run.of,
        "course": asdict(run.course),
        "stop_ids": run.stop_ids,
    }
    run.checkpoints.save(run.state, record, score=score)


def go_on(run: Run, checkpoint: Path) -> None:
    """Put everything back as it was when the checkpoint was taken.

    Raises:
        CheckpointError: it was taken of other data, another batch or another model.
    """
    record = read_record(checkpoint)
    with reading(checkpoint):
        check_unchanged(record["of"], run.of, checkpoint)
        run.loader.restore(LoaderState.from_dict(record["loader"]))
        run.total = run.loader.steps_total()
        run.random_states = record["randomness"]
        run.course = Course(**record["course"])
    run.checkpoints.load(run.state, checkpoint)
    if run.state.counters.step > run.total:
        raise CheckpointError(
            f"was taken after {run.state.counters.step} steps, and the run now has {run.total}",
            where=str(checkpoint),
            remedy="give it as many steps again, or start anew with another output or --resume never",
        )
    logger.info("going on from step %d", run.state.counters.step)


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
        with stage("exporting"):
            summary |= export_state(run.config, run.state, run.stop_ids, run.directory.export, form, measured)
    return summary


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def best_now(run: Run) -> bool:
    """Whether this very step has the lowest validation loss so far, and its checkpoint is to be kept."""
    return run.config.checkpoint.keep_best and run.course.best_step == run.state.counters.step


def enough(run: Run) -> bool:
    """Whether the validation loss has not fallen for long enough to stop early."""
    patience = run.config.evaluation.early_stopping
    return patience is not None and run.course.waited >= patience
