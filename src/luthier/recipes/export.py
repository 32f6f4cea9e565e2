"""`luthier export`: what a run has trained, as a directory that Transformers or PEFT opens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from luthier.adapters import Merging, rounds_of, save_peft
from luthier.config import LoraConfig, RunConfig
from luthier.config.sections import SGDConfig
from luthier.engine.checkpoint import Checkpointer, check_unchanged, committed, read_record, reading
from luthier.engine.state import TrainState
from luthier.errors import CheckpointError, ConfigError
from luthier.hf.classifier import as_classifier, padding_of
from luthier.hf.save import base_dtype, replacing, save_model
from luthier.hf.together import rank_in, together
from luthier.hf.tokenizer import stop_token_ids
from luthier.hf.vision.processor import save_reader
from luthier.recipes.run_directory import RunDirectory
from luthier.recipes.setup import identity, prepare_process, state_of, tokenizer_of
from luthier.report.card import model_card

logger = logging.getLogger(__name__)

Form = Literal["merge", "adapter"]


def export(run: Path, *, output: Path, step: int | None = None, form: Form | None = None) -> dict[str, Any]:
    """Write a checkpoint of a run as a directory of its own.

    Args:
        run: the output directory of a training run.
        output: where to write.
        step: which checkpoint; the newest when left out.
        form: "merge" for a whole model, "adapter" for PEFT files; a whole model when left out.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: adapter files are asked for and the run trained no adapter.
    """
    directory, config = RunDirectory.existing(run)
    checkpoint = _checkpoint(directory, step)
    device = prepare_process(config)
    # An optimizer without moments: an export needs the weights alone.
    state = state_of(config.model_copy(update={"optimizer": SGDConfig(name="sgd")}), device)
    state.tokenizer = tokenizer_of(config)
    checkpoints = Checkpointer(directory.checkpoints, trainable_only=trainable_only(config))
    with reading(checkpoint):
        _require_same_base(read_record(checkpoint)["of"], identity(config, state), checkpoint)
    record = checkpoints.load(state, checkpoint, weights_only=True)
    course = record["course"]
    measured = {"loss": course["loss"], "validation": course["validation"]}
    return {
        "run": str(run),
        "step": state.counters.step,
        **export_state(config, state, record["stop_ids"], output, form, measured),
    }


def export_state(
    config: RunConfig,
    state: TrainState,
    turn_ends: list[int],
    output: Path,
    form: Form | None,
    measured: dict[str, Any],
) -> dict[str, Any]:
    """Write what is in memory; training may go on after it.

    Args:
        config: of the run.
        state: what was trained.
        turn_ends: tokens that ended trained turns; generation of the export stops on them.
        output: where to write.
        form: as of `export`.
        measured: losses for the model card.
    """
    if form is None and config.adapter is not None and config.adapter.kind != "lora":
        form = "adapter"  # there is no weight that it could be in
    if form == "adapter" and state.lora is None:
        raise ConfigError("this run trained no adapter", where="--adapter", remedy="leave it out for the whole model")
    if form == "adapter" and own_base(config):
        what = "adapter.init has quantised another base than the model's: its adapter fits no other"
        raise ConfigError(what, where="--adapter", remedy="leave it out for the whole model")
    tokenizer, model = state.tokenizer, state.model
    if config.method.name == "reward":
        model = as_classifier(model, padding_of(tokenizer))
    group = dist.group.WORLD if state.mesh is not None else None
    card = model_card(config, measured, form=form or "merge")
    if form == "adapter":
        with replacing(output, {}, group) as aside:
            save_peft(model, aside, base_model=config.model, revision=config.revision, group=group)
            with together(group):
                if rank_in(group) == 0:
                    save_reader(tokenizer, aside)
                    (aside / "README.md").write_text(card, encoding="utf-8")
        return {"export": str(output), "form": "adapter"}
    merging = Merging(model)
    save_model(
        model,
        output,
        tokenizer=tokenizer,
        stop_tokens=stop_token_ids(tokenizer, state.model.generation_config, turn_ends),
        dtype=base_dtype(state.source),
        card=card,
        transform=merging,
        group=group,
    )
    result: dict[str, Any] = {"export": str(output), "form": "merge"}
    if state.lora is not None:
        report = merging.report(group)
        logger.info("%s", report)
        result["merged"] = str(report)
    return result


def own_base(config: RunConfig) -> bool:
    """Whether an adapter stands beside codes that are not those of the model's weights (`adapters.loftq`)."""
    return isinstance(config.adapter, LoraConfig) and rounds_of(config.adapter.init) > 1


def trainable_only(config: RunConfig) -> bool:
    """Whether checkpoints leave frozen weights out."""
    asked = config.checkpoint.trainable_only
    return asked if asked is not None else config.adapter is not None


def _require_same_base(taken_of: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Adapters on another base, or with another scale, would fit and be wrong: a config that was edited is refused.

    With another precision the weights of the base cannot be compared.
    """

    def matters(of: dict[str, Any]) -> dict[str, Any]:
        facts = {key: value for key, value in of.items() if key.startswith("adapter")}
        for key in ("adapter.dropout", "adapter.start_from"):
            facts.pop(key, None)
        if taken_of["train.precision"] == now["train.precision"]:
            facts["weights of the model"] = of["model"]
        return facts

    check_unchanged(matters(taken_of), matters(now), checkpoint)


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    found = committed(run.checkpoints)
    if not found:
        raise CheckpointError("there is no checkpoint to export", where=str(run.checkpoints))
    if step is None:
        return found[-1]
    steps = {int(path.name.rpartition("-")[2]): path for path in found}
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise CheckpointError(
            f"there is no checkpoint of step {step}", where=str(run.checkpoints), remedy=f"there are {there}"
        )
    return steps[step]
