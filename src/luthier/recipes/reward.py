"""A reward model: `method: reward`. A score on the last token of a text learns which of two answers is preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from luthier.batch import Batch, Sample
from luthier.config import RunConfig
from luthier.config.reinforcement import RewardConfig
from luthier.data.formats.preference import margin_of
from luthier.data.loader import StepBatch, pack
from luthier.data.report import BadRow
from luthier.engine.reward import Ranking, Weighing, ranking, scores_of
from luthier.engine.state import TrainState
from luthier.engine.step import ForwardBackward, forward_backward_all
from luthier.hf.classifier import last_place, padding_of
from luthier.recipes.each_alone import apart, each_alone
from luthier.recipes.loop import finish, loop, noted, update
from luthier.recipes.pairs import Compared
from luthier.recipes.references import totals
from luthier.recipes.run import Resume, Run, opened
from luthier.recipes.setup import held_out_batches
from luthier.report.progress import stage


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it; as `sft.train`."""
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on the pairs of one global batch.

    Returns:
        what `update` gives, and scores of the preferred and the other answers, their margin, and the share of pairs in
        which the preferred one has the higher score: before the step.
    """
    method = run.config.method
    assert isinstance(method, RewardConfig)
    padding = padding_of(run.state.tokenizer)
    microbatches = [laid_out(one, padding, 1 / batch.rows) for one in batch.microbatches]
    if run.state.packing_fault:
        outputs = one_by_one(run.state, microbatches, method.center)
    else:
        outputs = forward_backward_all(run.state, microbatches, Ranking(method.center))
    taken = replace(batch, microbatches=microbatches)
    found = [output.logprobs.cpu()[one.weights[0] != 0] for one, output in zip(microbatches, outputs, strict=True)]
    return {**update(run, taken, outputs), **_report(totals(run, _sums(torch.cat(found))))}


def one_by_one(state: TrainState, batches: Sequence[Batch], center: float) -> list[ForwardBackward]:
    """A step's forward and backward for a model that reads one document at a time.

    Args:
        state: whose gradients grow.
        batches: as of `laid_out`, of one row each.
        center: as of `Ranking`.
    """

    def placed(asked: Sequence[Batch]) -> list[torch.Tensor]:
        scores = [_scored(state, batch).cpu() for batch in asked]
        return [
            found.new_zeros(batch.tokens).index_put((batch.weights[0] != 0,), found)
            for batch, found in zip(asked, scores, strict=True)
        ]

    def loss(found: torch.Tensor, here: Batch) -> torch.Tensor:
        places = here.weights[0] != 0
        return ranking(found[places], here.weights[0, places], here.inputs["margin"], center)

    return each_alone(state, batches, placed, loss, Weighing())


def _scored(state: TrainState, batch: Batch) -> torch.Tensor:
    """The scores of the documents of a microbatch, also of a model that reads one at a time; all ranks call it."""
    return torch.cat(scores_of(state, apart(batch) if state.packing_fault else [batch]))


def measure(run: Run) -> Compared:
    """Loss and scores of the held-out pairs now, noted in the run's course."""
    method, state = run.config.method, run.state
    assert isinstance(method, RewardConfig)
    assert run.held_out is not None
    padding = padding_of(state.tokenizer)
    loss, told = 0.0, [0.0] * 4
    training = state.model.training
    state.model.eval()
    with stage("evaluating"):
        for batch in held_out_batches(state, run.held_out, run.config):
            one = laid_out(batch, padding, 1.0)
            scores = _scored(state, one).cpu()
            loss += float(ranking(scores, torch.ones(len(scores)), one.inputs["margin"], method.center))
            told = [left + right for left, right in zip(told, _sums(scores), strict=True)]
    state.model.train(training)
    *sums, loss = totals(run, [*told, loss])
    loss /= max(sums[3], 1.0)
    result = Compared(loss, {"loss": loss, **_report(sums)})
    noted(run, result)
    return result


def laid_out(batch: Batch, padding: int, share: float) -> Batch:
    """A microbatch of pairs with every token of each text in it, the last one too, and a weight where its score is.

    Args:
        batch: rows of two documents each.
        padding: the id that fills rows up.
        share: of a pair.

    Raises:
        DataError: a margin is no number (of a format of one's own: others have looked).
    """
    rows, margins, document = [], [], 0
    bounds = batch.cu_seqlens.tolist()
    for row in batch.rows:
        texts = []
        for place in range(document, document + row.documents):
            span = slice(bounds[place], bounds[place + 1])
            ids = [*batch.input_ids[0, span].tolist(), int(batch.targets[0, span][-1])]
            weights = np.zeros(len(ids), np.float32)
            weights[last_place(ids, padding)] = 1.0
            texts.append(Sample(np.array(ids), np.array(ids), weights, batch.origins[place]))
        document += row.documents
        if row.documents == 2:
            rows.append(Sample.join(texts, texts[0].origin, row.meta, row.number))
            margins += [_margin(row.meta, texts[0].origin)] * 2
    laid = pack(rows)
    return replace(laid.scaled(share), inputs={"margin": torch.tensor(margins or [0.0], dtype=torch.float64)})


def _margin(meta: Mapping[str, Any], origin: str) -> float:
    try:
        return margin_of(meta.get("margin")) or 0.0
    except BadRow as fault:
        raise fault.at(origin) from None


def _sums(scores: torch.Tensor) -> list[float]:
    """Of scores of pairs end to end: sum of the preferred, of the others, how often the first is higher, how many."""
    chosen, rejected = scores.double().view(-1, 2).unbind(1)
    return [float(chosen.sum()), float(rejected.sum()), float((chosen > rejected).sum()), float(len(chosen))]


def _report(sums: Sequence[float]) -> dict[str, float]:
    chosen, rejected, right, count = sums
    count = max(count, 1.0)
    return {
        "reward_chosen": chosen / count,
        "reward_rejected": rejected / count,
        "reward_margin": (chosen - rejected) / count,
        "reward_accuracy": right / count,
    }
