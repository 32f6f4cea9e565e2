"""Learning from rewards, GRPO, and to give them: the reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from luthier.config.kinds import Kind
from luthier.config.method import Method
from luthier.config.sections import one_or_many

if TYPE_CHECKING:
    from luthier.config.run import RunConfig

_CUTS = ("tp", "cp", "pp", "ep")


class GrpoConfig(Method):
    """Group-relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300): the model answers each
    prompt several times, and answers better than their group's mean are made likelier. A step takes
    `train.rows_per_step` prompts."""

    rows: ClassVar[Kind] = "prompts"

    name: Literal["grpo"]
    rewards: Annotated[list[str], BeforeValidator(one_or_many), Field(min_length=1)]
    """Python functions, each as package.module:function or FILE.py:function, called with lists: `prompts`,
    `completions`, `completion_ids` and the other columns of the rows by name; each gives a list of numbers (None: no
    say)."""
    weights: list[float] | None = None
    """Of each reward in their sum; 1 each when left out."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt."""
    max_new_tokens: PositiveInt = 256
    """An answer that has not ended by then is cut."""
    stop: Annotated[list[str], BeforeValidator(one_or_many)] = []
    """Strings that end an answer, beside the model's own end of a turn."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Of sampling, and of the distribution that is trained."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
    """0 for no limit."""
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """What the sum over tokens is divided by: grpo the length of each answer and their number; dapo and bnpo the tokens
    of all answers of the step; dr_grpo the number of answers times max_new_tokens (Liu et al. 2025,
    https://arxiv.org/abs/2503.20783)."""
    ratio: Literal["token", "sequence"] = "token"
    """Whose probability now over that when sampled is clipped: each token's, or the answer's geometric mean (GSPO,
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071)."""
    epsilon_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """The ratio is clipped below 1 - epsilon_low."""
    epsilon_high: NonNegativeFloat | None = None
    """And above 1 + epsilon_high; as below when left out (DAPO takes 0.28, Yu et al. 2025,
    https://arxiv.org/abs/2503.14476)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation rewards less their group's mean are divided by."""
    beta: NonNegativeFloat = 0.0
    """Weight of the divergence from the model before its first step; the weights that train are kept for it."""
    unbiased_kl: bool = True
    """Multiply the divergence by the ratio, so that its gradient is that of the reverse KL (DeepSeek-AI 2025,
    https://arxiv.org/abs/2512.02556), as TRL does."""
    filter_groups: bool = False
    """Leave groups out whose rewards are all equal, as DAPO does: they teach nothing, and no longer count."""
    resample: NonNegativeInt = 0
    """How often such a group is sampled again, with other seeds, before it is left out."""
    updates_per_sample: PositiveInt = 1
    """Updates of the weights with the same answers; a step is all of them."""
    mask_truncated: bool = False
    """Do not train on answers that were cut at max_new_tokens."""

    @model_validator(mode="after")
    def _holds_together(self) -> GrpoConfig:
        if self.weights is not None and len(self.weights) != len(self.rewards):
            raise ValueError(f"there are {len(self.rewards)} rewards and {len(self.weights)} weights")
        if self.resample and not self.filter_groups:
            raise ValueError("resample is for groups that filter_groups leaves out; set that to true")
        return self

    @property
    def high(self) -> float:
        """epsilon_high, as below when left out."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high

    def refused_degree(self, name: str) -> str | None:
        """Whatever cuts rows or weights otherwise than FSDP does, as of `Method`."""
        if name not in _CUTS:
            return None
        return (
            f"grpo samples with a whole copy of the model on each data rank, so it has no parallel.{name}; "
            "use dp_shard or dp_replicate"
        )

    def check(self, run: RunConfig) -> None:
        """Refuse held-out rows."""
        data = run.data
        if data.validation is not None or data.validation_fraction is not None:
            raise ValueError("grpo measures its reward at every step, and nothing on held-out rows; leave those out")
        if run.evaluation.every is not None or run.evaluation.early_stopping is not None:
            raise ValueError("grpo has no validation loss; leave evaluation.every and early_stopping out")


class RewardConfig(Method):
    """A reward model (Bradley and Terry 1952): a score on the last token of a text learns which of two answers to a
    prompt is preferred. It is exported as a sequence classification of one label."""

    rows: ClassVar[Kind] = "pairs"

    name: Literal["reward"]
    center: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps them near 0 (Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244); TRL calls it center_rewards_coefficient."""

    def refused_degree(self, name: str) -> str | None:
        """Where a text's last token lies elsewhere than its score, as of `Method`."""
        return f"a reward model has no parallel.{name}; use dp_shard or dp_replicate" if name in _CUTS else None

    def check(self, run: RunConfig) -> None:
        """Refuse adapters that have no place for a score."""
        if run.adapter is not None and run.adapter.kind != "lora":
            raise ValueError(f"adapter.kind {run.adapter.kind} has no place for a score; use lora, or no adapter")
        if run.adapter is not None and run.adapter.start_from:
            raise ValueError("a reward model begins with a new score; leave adapter.start_from out")
