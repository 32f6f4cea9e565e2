"""How a run trains: `method: dpo`, or `method: {name: dpo, beta: 0.1}`. One model for each recipe."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from luthier.config.kinds import Kind
from luthier.config.method import Method
from luthier.config.reinforcement import GrpoConfig, RewardConfig
from luthier.config.sections import PathText
from luthier.config.teaching import DistillConfig, PretrainConfig


class SftConfig(Method):
    """Supervised fine-tuning: weighted cross-entropy of what each row says."""

    shorthand = "name"

    name: Literal["sft"] = "sft"


class _SharedPrompts(Method):
    only_speed: ClassVar[frozenset[str]] = frozenset({"share_prompt"})

    share_prompt: bool = True
    """Run the prompt of a row's two answers once, forward and backward, where the model's layers allow it; the same
    gradients either way without dropout. With it, the model's or adapter.dropout, a shared prompt draws once, not once
    for each answer: as exact a sample, but another."""


class DpoConfig(_SharedPrompts):
    """Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) on pairs of answers."""

    rows: ClassVar[Kind] = "pairs"

    name: Literal["dpo"]
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference; ipo calls it tau."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """sigmoid; ipo (Azar et al. 2023); hinge (Zhao et al. 2023, SLiC); robust (Chowdhury et al. 2024)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round (sigmoid: conservative DPO; robust)."""
    reference: PathText = "precomputed"
    """What answers are compared with. precomputed: the model before its first step, run over the rows once and kept by
    content; base: the same, run again in every step; or another model, named as `model` is, run over the rows once."""

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of the mean cross-entropy of chosen answers' tokens, added to the loss."""

    @model_validator(mode="after")
    def _smoothed(self) -> DpoConfig:
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"{self.loss} has no label smoothing; leave label_smoothing out, or use sigmoid or robust")
        return self


class OrpoConfig(_SharedPrompts):
    """Odds-ratio preference optimisation (Hong et al. 2024, https://arxiv.org/abs/2403.07691): no reference."""

    rows: ClassVar[Kind] = "pairs"

    name: Literal["orpo"]
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio beside the cross-entropy of the chosen answer (lambda in the paper)."""
    train_on_prompt: bool = False
    """Count the prompt in the cross-entropy too, as TRL does; held-out rows are measured by answers alone."""


class SimpoConfig(_SharedPrompts):
    """Simple preference optimisation (Meng et al. 2024, https://arxiv.org/abs/2405.14734): no reference."""

    rows: ClassVar[Kind] = "pairs"

    name: Literal["simpo"]
    beta: PositiveFloat = 2.0
    """Scale of the mean log-probability of an answer's tokens."""
    gamma: NonNegativeFloat = 1.0
    """The margin that the chosen answer is to have (TRL: simpo_gamma)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round."""
    cross_entropy: NonNegativeFloat = 0.0
    """As of dpo (TRL: cpo_alpha)."""


class KtoConfig(Method):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306): answers with a label
    each, good or bad."""

    rows: ClassVar[Kind] = "labelled"

    name: Literal["kto"]
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of answers that are good."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of answers that are bad."""
    reference: PathText = "precomputed"
    """As of dpo."""


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    return {"name": "sft", **value} if isinstance(value, dict) else value


MethodConfig = Annotated[
    Annotated[
        SftConfig
        | DpoConfig
        | OrpoConfig
        | SimpoConfig
        | KtoConfig
        | GrpoConfig
        | RewardConfig
        | DistillConfig
        | PretrainConfig,
        Field(discriminator="name"),
    ],
    BeforeValidator(_named),
]
