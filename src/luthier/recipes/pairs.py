"""What ways of training on pairs share: a step and a measurement of a loss that compares two answers.

The loss is a mean over the pairs of the whole global batch: how they lie in microbatches and on ranks changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from luthier.batch import NO_TOKEN, Batch
from luthier.config import RunConfig
from luthier.data.loader import StepBatch
from luthier.engine.step import forward_backward_all
from luthier.losses.preference import document_sums
from luthier.recipes.each_alone import each_alone
from luthier.recipes.loop import finish, loop, noted, update
from luthier.recipes.references import (
    held_out_reference,
    held_out_sums,
    logprobs,
    shares_prompts,
    totals,
    with_reference,
)
from luthier.recipes.run import Resume, Run, opened

ANSWERS = "answers"
"""Input of a batch: weights of the tokens of answers, where `weights` counts more than them."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some pairs, as a loss sees them: float64 [pairs] each, the first answer of a row being the preferred one.

    Attributes:
        chosen, rejected: sum of the log-probabilities of an answer's tokens.
        chosen_tokens, rejected_tokens: how many there are.
        reference_chosen, reference_rejected: the sums under the reference; 0 without one.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor

    @property
    def gains(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi / ref of the preferred and of the other answers."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean log-probability of the tokens of the preferred and of the other answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


@dataclass(frozen=True, slots=True)
class Objective:
    """What a way of training on pairs minimises.

    Attributes:
        losses: a loss for each pair.
        rewards: how good the model finds the preferred and the other answers, for the report.
        needs_reference: whether `losses` reads the reference.
        cross_entropy: weight of the mean cross-entropy of the tokens of preferred answers, which is added.
        train_on_prompt: whether that counts the prompt's tokens too.
    """

    losses: Callable[[Pairs], torch.Tensor]
    rewards: Callable[[Pairs], tuple[torch.Tensor, torch.Tensor]]
    needs_reference: bool = False
    cross_entropy: float = 0.0
    train_on_prompt: bool = False


@dataclass(frozen=True)
class Preference:
    """A recipe that trains on pairs, whatever it minimises.

    Attributes:
        objective: of a config.
    """

    objective: Callable[[RunConfig], Objective]

    def train(self, config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
        """Run a config to its end, or go on with it; as of `sft.train`."""
        with opened(config, resume) as run:
            loop(run, self.take_step, self.measure)
            return finish(run)

    def take_step(self, run: Run, batch: StepBatch) -> dict[str, float]:
        """One optimizer step on one global batch of pairs."""
        return take_step(run, batch, self.objective(run.config))

    def measure(self, run: Run) -> Compared:
        """Loss and rewards of the held-out pairs now."""
        return measure(run, self.objective(run.config))


@dataclass(frozen=True, slots=True)
class Compared:
    """What was measured on held-out rows.

    Attributes:
        loss: mean over the rows.
        metrics: all columns, by name.
    """

    loss: float
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.metrics}


def take_step(run: Run, batch: StepBatch, objective: Objective) -> dict[str, float]:
    """One optimizer step on the pairs of one global batch.

    Returns:
        what `update` gives, and rewards of the preferred and the other answers, their margin, and the share of pairs in
        which the preferred one has the higher reward: before the step.

    Raises:
        NonFiniteError: as of `update`.
    """
    microbatches = batch.microbatches
    if objective.needs_reference:
        microbatches = with_reference(run, microbatches)
    if objective.train_on_prompt:
        microbatches = [_with_prompts(microbatch) for microbatch in microbatches]
    share = 1 / batch.rows
    weight = 0.0
    if objective.cross_entropy:
        [tokens] = totals(run, [sum(float(_preferred(m).sum()) for m in microbatches)])
        weight = objective.cross_entropy / tokens

    def loss(found: torch.Tensor, here: Batch) -> torch.Tensor:
        value = objective.losses(pairs_of(here, found)).sum() * share
        if weight:
            counted = _preferred(here)
            value = value - (torch.where(counted != 0, found, 0.0).double() * counted).sum() * weight
        return value

    if run.state.packing_fault:
        outputs = each_alone(run.state, microbatches, lambda batches: logprobs(run.state, batches, False), loss)
    else:
        outputs = forward_backward_all(run.state, microbatches, loss, share_prefixes=shares_prompts(run))
    with torch.no_grad():
        told = torch.zeros(4, dtype=torch.float64)
        for microbatch, output in zip(microbatches, outputs, strict=True):
            told += _rewarded(objective, pairs_of(microbatch, output.logprobs.cpu()))
    return {**update(run, batch, outputs), **_report(totals(run, told.tolist()))}


def measure(run: Run, objective: Objective) -> Compared:
    """Loss and rewards of the held-out pairs now, noted in the run's course."""
    sums, tokens = (torch.from_numpy(found) for found in held_out_sums(run))
    reference = torch.zeros_like(sums)
    if objective.needs_reference:
        reference = torch.from_numpy(held_out_reference(run))
    pairs = Pairs(*sums.unbind(1), *tokens.unbind(1), *reference.unbind(1))
    loss = float(objective.losses(pairs).mean())
    if objective.cross_entropy:
        loss -= objective.cross_entropy * float(pairs.chosen.sum() / pairs.chosen_tokens.sum())
    result = Compared(loss, {"loss": loss, **_report(_rewarded(objective, pairs).tolist())})
    noted(run, result)
    return result


def pairs_of(batch: Batch, found: torch.Tensor) -> Pairs:
    """The pairs of a microbatch; none in one that only takes part.

    Args:
        batch: rows of two documents each.
        found: [T], log-probabilities of the targets.
    """
    weights = batch.inputs.get(ANSWERS, batch.weights[0])
    sums = document_sums(found, weights, batch.cu_seqlens)
    tokens = document_sums(torch.ones_like(weights), weights, batch.cu_seqlens)
    reference = batch.inputs.get("reference")
    reference = torch.zeros_like(tokens) if reference is None else reference
    first = torch.tensor(_first(batch), dtype=torch.int64, device=sums.device)
    return Pairs(*(values[first + place] for values in (sums, tokens, reference) for place in (0, 1)))


def _first(batch: Batch) -> list[int]:
    """The document of the preferred answer of each row that is a pair."""
    found, document = [], 0
    for row in batch.rows:
        if row.documents == 2:
            found.append(document)
        document += row.documents
    return found


def _preferred(batch: Batch) -> torch.Tensor:
    """[T] weights of the documents of preferred answers, 0 elsewhere."""
    weights = torch.zeros_like(batch.weights[0])
    bounds: Sequence[int] = batch.cu_seqlens.tolist()
    for document in _first(batch):
        span = slice(bounds[document], bounds[document + 1])
        weights[span] = batch.weights[0, span]
    return weights


def _with_prompts(batch: Batch) -> Batch:
    """The same batch with the prompts of preferred answers trained on, and what are answers told apart."""
    widened = batch.weights.clone()
    bounds: Sequence[int] = batch.cu_seqlens.tolist()
    for document in _first(batch):
        span = slice(bounds[document], bounds[document + 1])
        prompt = (widened[0, span] == 0) & (batch.targets[0, span] != NO_TOKEN)
        widened[0, span] = torch.where(prompt, 1.0, widened[0, span])
    return replace(batch, weights=widened, inputs={**batch.inputs, ANSWERS: batch.weights[0]})


def _rewarded(objective: Objective, pairs: Pairs) -> torch.Tensor:
    """[4] sums over pairs: reward of the preferred, of the other, how often the first is higher, how many."""
    chosen, rejected = objective.rewards(pairs)
    right = (chosen > rejected).double()
    return torch.stack([chosen.sum(), rejected.sum(), right.sum(), right.new_tensor(float(len(right)))])


def _report(sums: Sequence[float]) -> dict[str, float]:
    chosen, rejected, right, count = sums
    count = max(count, 1.0)
    return {
        "reward_chosen": chosen / count,
        "reward_rejected": rejected / count,
        "reward_margin": (chosen - rejected) / count,
        "reward_accuracy": right / count,
    }
