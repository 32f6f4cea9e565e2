"""Names, units and meanings of everything in metrics.jsonl and in the trackers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One column."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "step": Metric("steps", "optimizer steps so far, skipped ones included; the first row is step 1"),
    "epoch": Metric("passes", "passes through the training rows so far"),
    "loss": Metric(
        "nats a token",
        "sum of weighted token losses / sum of weights over this step's global batch; of pairs, labelled answers, "
        "scores and grpo's answers what their method minimises, which is in no nats a token",
    ),
    "aux_loss": Metric("", "load-balancing loss of the experts over this step's global batch, before its coefficient"),
    "reward_chosen": Metric("", "mean reward of this step's preferred, or good, answers, before the step"),
    "reward_rejected": Metric("", "mean reward of this step's other answers"),
    "reward_margin": Metric("", "the first less the second"),
    "reward_accuracy": Metric("", "share of this step's pairs in which the preferred answer has the higher reward"),
    "divergence": Metric("nats", "how far the model is from its reference, as kto estimates it on this step's rows"),
    "reward": Metric("", "grpo: mean weighted sum of the rewards of this step's answers"),
    "reward_std": Metric("", "grpo: its standard deviation over this step's answers"),
    "reward/*": Metric("", "grpo: mean of one reward function over the answers that it had a say about"),
    "completion_length": Metric("tokens", "grpo: mean length of this step's answers, the end included"),
    "truncated": Metric("", "grpo: share of answers that were cut at max_new_tokens"),
    "filtered_groups": Metric("groups", "grpo: left out of this step since their rewards were all equal"),
    "resampled_groups": Metric("groups", "grpo: sampled again in this step since their rewards were all equal"),
    "equal_groups": Metric("", "grpo: share of groups whose rewards were all equal"),
    "clip_low": Metric("", "grpo: share of tokens (ratio: sequence: of answers) clipped below, which train no more"),
    "clip_high": Metric("", "grpo: the same above"),
    "kl": Metric(
        "nats a token", "grpo: estimate of the divergence from the base (http://joschu.net/blog/kl-approx.html)"
    ),
    "gradient_norm": Metric("", "2-norm of all gradients together, before clipping"),
    "learning_rate": Metric("", "what this step was taken with"),
    "rows": Metric("rows", "trained on so far"),
    "tokens": Metric("tokens", "read by the model so far"),
    "trained_tokens": Metric("tokens", "of these, those with a weight in the loss"),
    "skipped_steps": Metric("steps", "left out so far because loss or gradient was not finite"),
    "step_seconds": Metric("s", "wall time of this step, waiting for data included"),
    "tokens_per_second": Metric("tokens/s", "tokens of this step / its time"),
    "flops_per_second": Metric(
        "FLOP/s", "matrix products that this step needs / its time; recomputation is not counted"
    ),
    "peak_share": Metric("", "flops_per_second / what the machine does at most on matrices of this dtype"),
    "compiled_graphs": Metric("graphs", "made by torch.compile so far; more of them late in a run cost time"),
    "memory_bytes": Metric("bytes", "largest memory so far: of the device, or of the process on a CPU"),
    "validation_loss": Metric("nats a token", "the same loss over every validation row once"),
    "validation_perplexity": Metric("", "exp(validation_loss)"),
    "validation_tokens": Metric("tokens", "validation tokens with a weight in the loss"),
    "validation_reward_chosen": Metric("", "mean reward of the preferred, or good, validation answers"),
    "validation_reward_rejected": Metric("", "mean reward of the other validation answers"),
    "validation_reward_margin": Metric("", "the first less the second"),
    "validation_reward_accuracy": Metric("", "share of validation pairs whose preferred answer has the higher reward"),
    "validation_divergence": Metric("nats", "divergence on the validation rows"),
}


def known(name: str) -> bool:
    """Whether the table has a column, by its own name or as one of a family.

    >>> known("loss"), known("reward/correct"), known("nonsense")
    (True, True, False)
    """
    return name in METRICS or f"{name.partition('/')[0]}/*" in METRICS


def table() -> str:
    """The metrics as a Markdown table.

    >>> print(table().splitlines()[2])
    | `step` | steps | optimizer steps so far, skipped ones included; the first row is step 1 |
    """
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()]
    return "\n".join(["| name | unit | meaning |", "| --- | --- | --- |", *rows])
