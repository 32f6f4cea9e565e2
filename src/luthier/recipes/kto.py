"""Kahneman-Tversky optimisation: `method: kto`, on answers with a label each, good or bad.

A row holds its own answer and, beside it, another prompt's answer to the same prompt. Of these the model's distance
from its reference is estimated, once for the whole global batch, before the step's own answers are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from luthier.batch import Batch, Sample
from luthier.config import RunConfig
from luthier.config.methods import KtoConfig
from luthier.data.loader import StepBatch, pack
from luthier.engine.evaluate import logprobs_of
from luthier.engine.step import forward_backward_all
from luthier.losses.preference import document_sums, kl_estimate, kto
from luthier.recipes.loop import finish, loop, noted, update
from luthier.recipes.pairs import Compared
from luthier.recipes.references import held_out_reference, held_out_sums, totals, with_reference
from luthier.recipes.run import Resume, Run, opened


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it; as of `sft.train`."""
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """One optimizer step on the answers of one global batch.

    Returns:
        what `update` gives, rewards of good and bad answers, their margin, and the estimate of the divergence.

    Raises:
        NonFiniteError: as of `update`.
    """
    method = run.config.method
    assert isinstance(method, KtoConfig)
    microbatches = with_reference(run, batch.microbatches)
    own, foreign = ([only(microbatch, place) for microbatch in microbatches] for place in (0, 1))
    divergence = _divergence(run, foreign)
    share = 1 / batch.rows

    def loss(logprobs: torch.Tensor, here: Batch) -> torch.Tensor:
        gains, good = gains_of(here, logprobs)
        return _losses(method, gains, good, divergence).sum() * share

    outputs = forward_backward_all(run.state, own, loss)
    told = torch.zeros(4, dtype=torch.float64)
    for microbatch, output in zip(own, outputs, strict=True):
        told += _rewarded(method, *gains_of(microbatch, output.logprobs.cpu()))
    taken = replace(batch, microbatches=own)
    return {**update(run, taken, outputs), **_report(totals(run, told.tolist())), "divergence": divergence}


def measure(run: Run) -> Compared:
    """Loss and rewards of the held-out answers now, noted in the run's course; the divergence is that of them all."""
    method, rows = run.config.method, run.held_out
    assert isinstance(method, KtoConfig)
    assert rows is not None
    sums, tokens = held_out_sums(run)
    gains = sums - held_out_reference(run)
    foreign = gains[~np.isnan(tokens[:, 1]), 1]  # the others are those of rows that carry no other prompt's answer
    divergence = kl_estimate(float(foreign.sum()), len(foreign))
    own = torch.from_numpy(gains[:, 0])
    good = torch.tensor([bool(rows[number].meta["label"]) for number in range(len(rows))])
    loss = float(_losses(method, own, good, divergence).mean())
    metrics = {"loss": loss, **_report(_rewarded(method, own, good).tolist()), "divergence": divergence}
    result = Compared(loss, metrics)
    noted(run, result)
    return result


def only(batch: Batch, place: int) -> Batch:
    """The documents at one place of each row, as a batch of their own; one that only takes part where there are none.

    Args:
        batch: with the reference among its inputs.
        place: 0 for the row's own answer, 1 for another prompt's.
    """
    bounds = batch.cu_seqlens.tolist()
    samples, reference, document = [], [], 0
    for row in batch.rows:
        if place < row.documents and "label" in row.meta:
            chosen = document + place
            span = slice(bounds[chosen], bounds[chosen + 1])
            tokens, targets, weights = (v[0, span].numpy() for v in (batch.input_ids, batch.targets, batch.weights))
            origin = batch.origins[chosen]
            samples.append(Sample(tokens, targets, weights.astype(np.float32), origin, (), row.meta, row.number))
            reference.append(float(batch.inputs["reference"][chosen]))
        document += row.documents
    told = torch.tensor(reference or [0.0], dtype=torch.float64)
    return replace(pack(samples), inputs={"reference": told})


def gains_of(batch: Batch, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi / ref of each answer of a batch that `only` made, and whether it is good."""
    gains = document_sums(logprobs, batch.weights[0], batch.cu_seqlens) - batch.inputs["reference"]
    labelled = [row.meta for row in batch.rows if "label" in row.meta]
    good = torch.tensor([bool(meta["label"]) for meta in labelled], dtype=torch.bool, device=gains.device)
    return gains[: len(labelled)], good


def _divergence(run: Run, batches: Sequence[Batch]) -> float:
    """How far the model is from its reference on other prompts' answers of the global batch; all ranks call it."""
    model = run.state.model
    model.eval()
    found = logprobs_of(run.state, batches)
    model.train()
    sums = [0.0, 0.0]
    for batch, logprobs in zip(batches, found, strict=True):
        gains, _ = gains_of(batch, logprobs.cpu())
        sums = [sums[0] + float(gains.sum()), sums[1] + len(gains)]
    return kl_estimate(*totals(run, sums))


def _losses(method: KtoConfig, gains: torch.Tensor, good: torch.Tensor, divergence: float) -> torch.Tensor:
    return kto(
        gains,
        good,
        gains.new_tensor(divergence),
        beta=method.beta,
        desirable_weight=method.desirable_weight,
        undesirable_weight=method.undesirable_weight,
    )


def _rewarded(method: KtoConfig, gains: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
    """[4] sum of the rewards of good answers, their number, and the same of bad ones."""
    rewards = method.beta * gains.detach()
    count = good.sum().double()
    return torch.stack([rewards[good].sum(), count, rewards[~good].sum(), len(good) - count])


def _report(sums: Sequence[float]) -> dict[str, float]:
    """Rewards of the kinds of answers that there are."""
    good, goods, bad, bads = sums
    told = {}
    if goods:
        told["reward_chosen"] = good / goods
    if bads:
        told["reward_rejected"] = bad / bads
    if goods and bads:
        told["reward_margin"] = good / goods - bad / bads
    return told
