"""Group-relative policy optimisation: `method: grpo`. A step samples answers, asks the rewards, and trains on both.

The prompts of a step are the rows of a global batch; `rollout.py` answers them, `losses/grpo.py` is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from luthier.batch import Batch, Sample
from luthier.config import RunConfig
from luthier.config.reinforcement import GrpoConfig
from luthier.data.loader import StepBatch, pack
from luthier.data.packing import microbatches
from luthier.engine.evaluate import Evaluation, logprobs_of
from luthier.engine.state import TrainState
from luthier.engine.step import ForwardBackward, LossFunction, forward_backward_all
from luthier.hf.together import exchange
from luthier.launch import unhurried
from luthier.losses import grpo as losses
from luthier.recipes.loop import finish, loop, update
from luthier.recipes.references import as_before
from luthier.recipes.rewards import load_rewards
from luthier.recipes.rollout import Group, Rollouts
from luthier.recipes.run import Resume, Run, opened


def train(config: RunConfig, *, resume: Resume = "auto") -> dict[str, Any]:
    """Run a config to its end, or go on with it; as `sft.train`."""
    assert isinstance(config.method, GrpoConfig)
    load_rewards(config.method.rewards)  # what cannot be imported is refused before anything is loaded
    with opened(config, resume) as run:
        loop(run, take_step, measure)
        return finish(run)


def take_step(run: Run, batch: StepBatch) -> dict[str, float]:
    """Sample groups of answers to the prompts of a batch, and update the weights with them.

    Returns:
        loss, gradient_norm, learning_rate, and what became of answers and rewards (`report.metrics`).

    Raises:
        DataError: a reward function fails.
        NonFiniteError: as of `update`; or the model's logits are not finite.
    """
    config, method = run.config, run.config.method
    assert isinstance(method, GrpoConfig)
    with unhurried():  # answers and reward functions take the longer on one rank than on another
        rollouts: Rollouts = run.once("rollouts", lambda: Rollouts(config, run.state))
        groups = rollouts(batch.microbatches, batch.state.step - 1)
        everyone = [group for part in exchange(groups, _world(run.state)) for group in part]
    told = described(everyone, method, list(rollouts.functions))
    state = replace(run.state, head=run.state.head.at(method.temperature))  # the distribution that was sampled from
    batches = _with_logprobs(state, laid_out(groups, everyone, method, run), method, run)
    taken = StepBatch(
        batches,
        batch.state,
        batch.rows,
        tokens=_total(state, sum(one.tokens for one in batches if one.trained_tokens)),
        trained_tokens=_total(state, sum(one.trained_tokens for one in batches)),
        total_weight=1.0,
        epoch=batch.epoch,
    )
    measured: dict[str, float] = {}
    seen: list[dict[str, float]] = []
    for number in range(method.updates_per_sample):
        outputs = (
            forward_backward_all(state, batches, loss_of(method)) if taken.trained_tokens else _nothing(state, batches)
        )
        seen.append(_ratios(state, batches, outputs, method))
        measured = update(run, taken, outputs, ends_step=number == method.updates_per_sample - 1)
    means = {key: sum(one[key] for one in seen) / len(seen) for key in seen[0]}
    return {**measured, **told, **means}


def measure(run: Run) -> Evaluation:
    """Nothing is measured on held-out rows: `GrpoConfig.check` refuses them."""
    raise AssertionError("grpo has no held-out rows")


def loss_of(method: GrpoConfig) -> LossFunction:
    """The loss of a microbatch of `laid_out`."""

    def loss(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return losses.grpo(
            logprobs,
            batch.inputs.get("sampled", logprobs.detach()),
            batch.inputs["advantages"],
            batch.weights[0],
            batch.cu_seqlens,
            low=method.epsilon_low,
            high=method.high,
            sequence=method.ratio == "sequence",
            reference=batch.inputs.get("reference"),
            beta=method.beta,
            unbiased=method.unbiased_kl,
        )

    return loss


def laid_out(groups: Sequence[Group], everyone: Sequence[Group], method: GrpoConfig, run: Run) -> list[Batch]:
    """Microbatches of a rank's answers, with weights and advantages.

    Args:
        groups: of this rank.
        everyone: of all ranks, for what a mean is of.
        method: how they count.
        run: how rows are packed.
    """
    counted = [group for group in everyone if not (method.filter_groups and group.equal)]
    rewards = torch.stack([group.rewards for group in counted]) if counted else None
    lengths = [_trained(group, number, method) for group in counted for number in range(len(group.answers))]
    total = {"answers": len(lengths), "tokens": sum(lengths), "longest": method.max_new_tokens}
    rows: list[tuple[Sample, float, float]] = []  # an answer, the weight of each of its tokens, its advantage
    for group in groups:
        if method.filter_groups and group.equal:
            continue
        found = losses.advantages(group.rewards[None], method.scale_rewards, rewards)[0].tolist()
        for number, answer in enumerate(group.answers):
            trained = _trained(group, number, method)
            if not trained or (found[number] == 0.0 and not method.beta):
                continue  # it would add exactly nothing
            weight = losses.token_weights(method.loss, [trained], **total)[0]
            ids = [*group.prompt, *answer.tokens]
            marks = [0.0] * len(group.prompt) + [1.0] * len(answer.tokens)
            rows.append((Sample.from_ids(ids, marks, group.origin), weight, found[number]))
    sizes = [len(sample) for sample, _, _ in rows]
    packing = run.config.data.packing and not run.state.packing_fault
    longest = max([run.config.data.sequence_length, *sizes])
    bins = microbatches(sizes, longest, packing)[0] if sizes else []
    count = max(exchange(len(bins), _world(run.state)))  # equally many on every rank, some of which just take part
    bins += [[] for _ in range(max(1, count) - len(bins))]
    return [_laid([rows[index] for index in indices], run.state.head.dtype) for indices in bins]


def _laid(rows: Sequence[tuple[Sample, float, float]], dtype: torch.dtype) -> Batch:
    batch = pack([sample for sample, _, _ in rows])
    sizes = torch.tensor([len(sample) for sample, _, _ in rows] or [1])
    weights = torch.tensor([weight for _, weight, _ in rows] or [0.0], dtype=torch.float64)
    found = torch.tensor([advantage for _, _, advantage in rows] or [0.0], dtype=dtype)
    return replace(
        batch,
        weights=torch.where(batch.weights != 0, weights.repeat_interleave(sizes)[None], 0.0),
        inputs={"advantages": found.repeat_interleave(sizes)},
    )


def _with_logprobs(state: TrainState, batches: list[Batch], method: GrpoConfig, run: Run) -> list[Batch]:
    """The same with the log-probabilities that the loss compares with, without dropout."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    training = state.model.training
    state.model.eval()
    try:
        if method.updates_per_sample > 1:
            for inputs, values in zip(found, logprobs_of(state, batches), strict=True):
                inputs["sampled"] = values.cpu()
        if method.beta:
            with as_before(run):
                for inputs, values in zip(found, logprobs_of(state, batches), strict=True):
                    inputs["reference"] = values.cpu()
    finally:
        state.model.train(training)
    return [replace(batch, inputs={**batch.inputs, **inputs}) for batch, inputs in zip(batches, found, strict=True)]


def _nothing(state: TrainState, batches: Sequence[Batch]) -> list[ForwardBackward]:
    """What microbatches give of which no rank has one that teaches. Nothing is run: gradients of zero, which ranks that
    share weights would get, are no gradients. With them momentum and weight decay would move the weights."""
    zero = torch.zeros((), dtype=state.head.dtype, device=state.device)
    return [ForwardBackward(zero, zero.expand(batch.tokens)) for batch in batches]


def _trained(group: Group, number: int, method: GrpoConfig) -> int:
    """Trained tokens of an answer."""
    answer = group.answers[number]
    return 0 if method.mask_truncated and answer.stop_reason == "length" else len(answer.tokens)


def _ratios(
    state: TrainState, batches: Sequence[Batch], outputs: Sequence[ForwardBackward], method: GrpoConfig
) -> dict[str, float]:
    """Shares of tokens that were clipped, and the divergence from the base."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch, output in zip(batches, outputs, strict=True):
        logprobs, weights = output.logprobs.cpu(), batch.weights[0]
        ratio = losses.log_ratio(
            logprobs,
            batch.inputs.get("sampled", logprobs),
            weights,
            batch.cu_seqlens,
            sequence=method.ratio == "sequence",
        ).exp()
        low, high = losses.clipped(ratio, batch.inputs["advantages"], low=method.epsilon_low, high=method.high)
        counts = weights != 0
        divergence = losses.divergence(logprobs, batch.inputs["reference"], weights).sum() if method.beta else 0.0
        sums += torch.tensor([(low & counts).sum(), (high & counts).sum(), divergence, counts.sum()])
    if state.mesh is not None:
        sums = state.mesh.sum(sums.to(state.device)).cpu()
    low_share, high_share, kl, _ = (sums / sums[3].clamp(min=1.0)).tolist()
    return {"clip_low": low_share, "clip_high": high_share} | ({"kl": kl} if method.beta else {})


def described(groups: Sequence[Group], method: GrpoConfig, names: Sequence[str]) -> dict[str, float]:
    """What became of answers and rewards of a step."""
    answers = [answer for group in groups for answer in group.answers]
    rewards = torch.cat([group.rewards for group in groups])
    each = torch.cat([group.by_function for group in groups])
    equal = sum(group.equal for group in groups)
    told = {
        "reward": float(rewards.nanmean()),
        "reward_std": float(losses.deviation(rewards, 0)),
        **{f"reward/{name}": float(each[:, number].nanmean()) for number, name in enumerate(names)},
        "completion_length": sum(len(answer.tokens) for answer in answers) / len(answers),
        "truncated": sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        "equal_groups": equal / len(groups),
    }
    if method.filter_groups:
        told |= {"filtered_groups": equal, "resampled_groups": sum(group.tries > 1 for group in groups)}
    return {name: value for name, value in told.items() if math.isfinite(value)}  # no say of any function: no number


def _world(state: TrainState) -> dist.ProcessGroup | None:
    return dist.group.WORLD if state.mesh is not None else None


def _total(state: TrainState, value: int) -> int:
    """The sum over the data ranks."""
    return sum(exchange(value, _world(state)))
