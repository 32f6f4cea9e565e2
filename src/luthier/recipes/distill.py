"""Distillation: `method: distill`. Supervised fine-tuning whose targets are a teacher's whole distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luthier.config import LoraConfig, RunConfig
from luthier.config.teaching import DistillConfig
from luthier.data.loader import StepBatch
from luthier.engine.build import build_network
from luthier.engine.distill import Distillation
from luthier.engine.network import Network
from luthier.engine.step import forward_backward_all
from luthier.errors import ConfigError, ModelError
from luthier.hf.source import ModelSource, named_in, resolve
from luthier.recipes.loop import finish, loop, update
from luthier.recipes.run import Resume, Run, opened
from luthier.recipes.setup import require_same_tokens, unpackable
from luthier.recipes.sft import measure
from luthier.recipes.taught import Taught, kept
from luthier.report.progress import stage

__all__ = ["measure", "take_step", "train"]


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it; as `sft.train`. What is measured on held-out rows is their
    cross-entropy, whatever the divergence.

    Raises:
        ConfigError: the teacher has another vocabulary.
    """
    assert isinstance(config.method, DistillConfig)
    _require_same_tokens(config, config.method)
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step: the weighted mean of the divergences of the trained tokens of a global batch.

    Returns:
        loss (nats a token), gradient_norm and learning_rate.

    Raises:
        NonFiniteError: as of `update`.
    """
    method = run.config.method
    assert isinstance(method, DistillConfig)
    loss = run.once("distillation", lambda: distillation(run))
    share = 1 / batch.total_weight if batch.total_weight else 0.0
    microbatches = [microbatch.scaled(share) for microbatch in batch.microbatches]
    if method.precompute:
        taught = run.once("taught", lambda: Taught(run, method, lambda: teacher_of(run)))
        microbatches = [taught.beside(microbatch) for microbatch in microbatches]
    outputs = forward_backward_all(run.state, microbatches, loss)
    return update(run, batch, outputs)


def distillation(run: Run) -> Distillation:
    """The loss of a run, its teacher loaded whole beside what trains unless it has been asked before."""
    method = run.config.method
    assert isinstance(method, DistillConfig)
    return Distillation(
        None if method.precompute else teacher_of(run),
        kind=method.divergence,
        beta=method.beta,
        temperature=method.temperature,
        cross_entropy=method.cross_entropy,
        top_k=method.top_k,
    )


def teacher_of(run: Run) -> Network:
    """The teacher, whole, in evaluation mode.

    Raises:
        ConfigError: top_k is more tokens than there are, its head has other tokens, or it cannot read the run's rows as
            these are packed for the model.
        ModelError: it cannot be read.
    """
    config, state, method = run.config, run.state, run.config.method
    assert isinstance(method, DistillConfig)
    adapter, tokens = method.teacher_adapter, _outputs(state.outline)
    if method.top_k is not None and method.top_k > tokens:
        what = f"it is {method.top_k:,}, and the vocabulary has {tokens:,} tokens"
        raise ConfigError(what, where="method.top_k", remedy=f"set it to {tokens} or less, or leave it out")
    with stage("loading the teacher"), named_in("method.teacher"):
        teacher = build_network(
            _source(method),
            adapter=LoraConfig(start_from=str(Path(adapter))) if adapter else None,
            precision=config.train.precision,
            device=state.device,
            attention=config.train.attention,
            trust_remote_code=config.trust_remote_code,
            seed=config.seed,
        )
    teacher.model.eval().requires_grad_(False)
    if (said := _outputs(teacher.model)) != tokens:
        what = f"it gives logits of {said:,} tokens, and the model of {tokens:,}"
        raise ConfigError(what, where="method.teacher", remedy="take a teacher of the same vocabulary")
    packed = config.data.packing and not method.precompute and not unpackable(state, run.rows)
    if packed and (why := unpackable(teacher, run.rows)):
        what = f"the teacher cannot read several documents in a row: {why}"
        raise ConfigError(what, where="data.packing", remedy="set it to false, or method.precompute: true")
    return teacher


def _require_same_tokens(config: RunConfig, method: DistillConfig) -> None:
    """Refuse a teacher whose tokens mean something else. One that is not there any more, and has been asked before, was
    looked at then."""
    try:
        with named_in("method.teacher"):
            require_same_tokens(method.teacher, _source(method), config, "method.teacher")
    except ModelError:
        if not kept(config, method):
            raise


def _source(method: DistillConfig) -> ModelSource:
    return resolve(method.teacher, revision=method.teacher_revision, where="method.teacher")


def _outputs(model: Any) -> int:
    """Tokens that a model has logits for."""
    head = model.get_output_embeddings()
    return int(head.weight.shape[0])
