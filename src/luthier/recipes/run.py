"""A training run that is open: what it works with, how it starts, goes on and is saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from luthier.config import RunConfig
from luthier.data.loader import Loader, LoaderState, Rows, StepBatch, StreamRows
from luthier.engine import randomness
from luthier.engine.checkpoint import Checkpointer, check_unchanged, random_states, read_record, reading
from luthier.engine.initial import Initial
from luthier.engine.state import TrainState
from luthier.errors import CheckpointError, ConfigError, UserError
from luthier.hf.save import remove_leftovers
from luthier.launch import join, restarted
from luthier.parallel.mesh import Mesh
from luthier.recipes.export import trainable_only
from luthier.recipes.run_directory import Interruption, RunDirectory
from luthier.recipes.setup import (
    identity,
    meshed,
    prepare_process,
    require_pictures_fit,
    rows_of,
    state_of,
    tokenizer_of,
    unpackable,
)
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
    measured_on: str | None = None
    """Fingerprint of the rows that all of these are of."""
    loss: float | None = None
    """Of the newest step."""
    skips: int = 0
    """Steps in a row that were skipped for not being finite."""


@dataclass
class Run:
    """Everything that a training run works with."""

    config: RunConfig
    directory: RunDirectory
    state: TrainState
    loader: Loader
    held_out: Rows | None
    checkpoints: Checkpointer
    of: dict[str, Any]
    rows: Rows | StreamRows
    total: int
    """Optimizer steps of the whole run."""
    interruption: Interruption
    report: Reporter = field(init=False)
    random_states: dict[str, Any] | None = None
    """Of the checkpoint that the run goes on from."""
    course: Course = field(default_factory=Course)
    initial: Initial | None = None
    """What trains as it was before the first step, where every step asks it (`reference: base`)."""
    reference: np.ndarray | None = None
    """Of training rows, the reference's log-probabilities of their answers; a recipe finds them when it needs them."""
    held_out_reference: np.ndarray | None = None
    taken: StepBatch | None = None
    """What the newest step was taken with."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a recipe has made ready for all its steps, by name."""
    stopped: list[int] = field(default_factory=list)
    """Stop tokens of the rows before the place that the run goes on from; a stream does not come to these again."""

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that ended what the model is to say: of a stream, in the rows that have been read so far."""
        return list(dict.fromkeys([*self.stopped, *self.rows.stop_ids]))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was asked for first; making it leaves the random state as it was."""
        if name not in self.kept:
            states = randomness.capture()
            self.kept[name] = make()
            randomness.restore(states)
        return self.kept[name]

    @property
    def data(self) -> dict[str, Any]:
        """What became of the rows: of a stream, of those that have been read so far."""
        return self.rows.report.to_dict()


@contextmanager
def opened(config: RunConfig, resume: Resume) -> Iterator[Run]:
    """A run ready for its next step; while it is open it owns its directory and minds SIGTERM."""
    directory = RunDirectory(config.output)
    with (
        join(prepare_process(config)) as device,
        meshed(config, device) as mesh,
        owned(directory, mesh),
        Interruption() as interruption,
    ):
        run = open_run(config, directory, resume, interruption, device, mesh)
        if run.state.is_main:
            for line in directory.changes(config) if run.state.counters.step else ():
                logger.info("going on with another %s", line)
            directory.write_config(config)
        with Reporter(directory.path, config, run.state, run.total) as run.report:
            # Last of all, so that nothing that was drawn while setting up counts.
            if run.random_states is None:
                # The step, since a run that goes on with another layout starts from here as well.
                part = mesh.part if mesh is not None else 0
                randomness.seed_everything(config.seed + part + 1_000_003 * run.state.counters.step)
            else:
                randomness.restore(run.random_states)
            try:
                yield run
            finally:
                # Before the directory is anybody else's, who would take a checkpoint in the making for a leftover.
                run.checkpoints.join()


@contextmanager
def owned(directory: RunDirectory, mesh: Mesh | None) -> Iterator[None]:
    """The run's directory and its log, which on a layout belong to the main rank alone; if the run is refused before it
    has begun, a directory that was not there before is gone again."""
    if mesh is None or mesh.rank == 0:
        is_new = not directory.path.exists()
        try:
            with directory.locked(), run_log(directory.log):
                yield
        except UserError:
            if is_new:
                directory.discard()
            raise
    else:
        yield


def open_run(
    config: RunConfig,
    directory: RunDirectory,
    resume: Resume,
    interruption: Interruption,
    device: torch.device,
    mesh: Mesh | None,
) -> Run:
    """Load data and model, and go on from the newest checkpoint if that is wanted."""
    tokenizer = tokenizer_of(config)
    rows, held_out = rows_of(config, tokenizer)
    for line in rows.report.lines() if isinstance(rows, Rows) else ():
        logger.info("%s", line)
    if held_out is not None and config.data.validation:
        for line in held_out.report.lines():
            logger.info("validation: %s", line)
    if isinstance(rows, Rows) and rows.pictures:
        require_pictures_fit(config, mesh)
    with stage("loading the model"):
        state = state_of(config, device, mesh)
    state.tokenizer = tokenizer
    logger.info("%s", state.lora or f"full fine-tuning of {state.parameters:,} parameters")
    if mesh is not None:
        logger.info("%d ranks: %s", mesh.layout.ranks, mesh.layout)
    data = config.data
    positions = state.limits.positions if state.limits is not None else None
    last = config.method.name == "reward"  # whose last token, which others only predict, is read as well
    for each in (rows, held_out):
        if positions is not None and isinstance(each, Rows) and each.longest_document + last > positions:
            raise ConfigError(
                f"there are rows of {each.longest_document + last:,} tokens, and the model has {positions:,} positions",
                where="data.sequence_length",
                remedy=f"set it to {positions - last} or less",
            )
    if data.packing and (why := unpackable(state, rows)):
        logger.warning("packing is off: %s", why)
        data = data.model_copy(update={"packing": False})
    ranks = {"rank": mesh.data_rank, "world_size": mesh.data_ranks} if mesh is not None else {}
    loader = Loader(rows, data, config.train, seed=config.seed, **ranks)
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
        of=identity(config, state),
        rows=rows,
        interruption=interruption,
        total=loader.steps_total(),
        initial=Initial(state) if config.compares_with_start else None,
    )
    if state.is_main:
        run.checkpoints.tidy()
        remove_leftovers(directory.export)
    if mesh is not None:
        mesh.wait()  # the others look at the directory when it is tidy
    newest = run.checkpoints.latest()
    if newest is not None and (resume != "never" or restarted()):
        go_on(run, newest)
    elif resume == "must":
        raise CheckpointError("there is no checkpoint to go on from", where=str(directory.checkpoints))
    elif newest is not None:
        if mesh is not None:
            mesh.wait()  # all have seen them
        if state.is_main:
            logger.warning("starting anew: the checkpoints in %s are removed", directory.checkpoints)
            run.checkpoints.clear()
    return run


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
    run.checkpoints.save(run.state, record, score=score, score_of=run.course.measured_on)


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
        run.random_states = random_states(checkpoint, run.state.mesh)
        run.course = Course(**record["course"])
        run.stopped = [int(token) for token in record["stop_ids"]]
    if run.held_out is not None and run.course.measured_on not in (None, run.held_out.fingerprint):
        logger.warning("the validation rows are others than before: the best loss and the patience begin anew")
        run.course = Course(loss=run.course.loss, skips=run.course.skips)
    run.checkpoints.load(run.state, checkpoint)
    if run.loader.past_end:
        raise CheckpointError(
            f"was taken after {run.state.counters.step} steps, and the run now ends after fewer",
            where=str(checkpoint),
            remedy="give it as many steps again, or start anew with another output or --resume never",
        )
    logger.info("going on from step %d", run.state.counters.step)
