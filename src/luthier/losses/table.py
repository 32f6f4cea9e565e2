"""The losses that a caller names: what each reads of a datum, how it may be set, and what is refused.

A loss that is not in this table does not exist. What a datum or a setting lacks, or has too much, is an error that
names it: nothing is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from luthier.errors import ConfigError, DataError
from luthier.losses import policy

Fields = Mapping[str, torch.Tensor]
"""Field of a datum -> its values, [T] or [T, K]."""
Settings = Mapping[str, float]

TARGETS = "target_tokens"
WEIGHTS = "weights"
NO_TARGET = -100
"""Target of a position that predicts nothing."""


Evaluate = Callable[[torch.Tensor, Fields, torch.Tensor, Settings], torch.Tensor]
"""(log-probabilities, inputs by name, bounds of rows, settings) -> the sum."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name.

    Attributes:
        name: what a caller calls it.
        value: value(logprobs, fields, cu_seqlens, settings) -> scalar sum in float64, differentiable in the [T]
            log-probabilities, which need be given where `counts` says so.
        counts: counts(fields) -> bool [T], the positions whose log-probability changes the value or the gradient.
        fields: what a datum must have beside `target_tokens`.
        optional: what it may have.
        settings: every setting with its default.
        soft: several targets a position are allowed.
    """

    name: str
    value: Evaluate
    counts: Callable[[Fields], torch.Tensor]
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    soft: bool = False

    def settings_of(self, asked: Mapping[str, Any] | None) -> dict[str, float]:
        """The settings in force.

        Args:
            asked: what a caller gave.

        Raises:
            ConfigError: there is no such setting, or it is no number that it can be.
        """
        if asked is not None and not isinstance(asked, Mapping):
            raise ConfigError(f"a {type(asked).__name__} is no mapping of settings to numbers", where="loss_fn_config")
        found = dict(self.settings)
        for key, value in (asked or {}).items():
            where = f"loss_fn_config.{key}"
            if key not in found:
                remedy = f"it has {', '.join(found)}" if found else "leave loss_fn_config out"
                raise ConfigError(f"{self.name} has no such setting", where=where, remedy=remedy)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= float(value) < math.inf:
                raise ConfigError(f"{value!r} is no number of 0 or more", where=where)
            found[key] = float(value)
        if found.get(_LOW, 0.0) > found.get(_HIGH, math.inf):
            what = f"{_LOW} {found[_LOW]:g} is above {_HIGH} {found[_HIGH]:g}"
            raise ConfigError(what, where="loss_fn_config", remedy="they bound the ratio itself, as 0.8 and 1.2 do")
        return found

    def check(self, fields: Fields, tokens: int, where: str) -> None:
        """Refuse a datum that this loss cannot be computed of.

        Args:
            fields: `loss_fn_inputs` of the datum, as tensors.
            tokens: how many positions its model_input has.
            where: the datum's name, for messages ("data[3]").

        Raises:
            DataError: a field is missing, unknown, of another shape, or not finite.
        """
        known = (TARGETS, *self.fields, *self.optional)
        for key in known:
            if key not in fields and key not in self.optional:
                raise DataError(f"{key} is missing, which {self.name} needs", where=_at(where, key))
        for key, values in sorted(fields.items(), key=lambda item: item[0] != TARGETS):
            if key not in known:
                remedy = f"it reads {', '.join(known)}"
                raise DataError(f"{self.name} has no use for {key}", where=_at(where, key), remedy=remedy)
            _check_shape(self, key, values, fields[TARGETS], tokens, where)
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                bad = int((~torch.isfinite(values)).flatten().nonzero()[0])
                raise DataError(f"value {bad} is {float(values.flatten()[bad])}", where=_at(where, key))
        if _MASK in fields and not bool(((fields[_MASK] == 0) | (fields[_MASK] == 1)).all()):
            raise DataError("a mask holds 0 and 1 alone", where=_at(where, _MASK))


def _check_shape(loss: Loss, key: str, values: torch.Tensor, targets: torch.Tensor, tokens: int, where: str) -> None:
    if key == TARGETS and (values.is_floating_point() or values.dtype == torch.bool):
        raise DataError("token ids are whole numbers", where=_at(where, key), remedy="give them as int64")
    if values.dim() > (2 if loss.soft else 1) or values.dim() == 0:
        allowed = "[T] or [T, K]" if loss.soft else "[T]"
        raise DataError(f"it is {list(values.shape)}, and {loss.name} takes {allowed}", where=_at(where, key))
    if values.dim() == 2 and values.shape[1] == 0:
        raise DataError(f"it is {list(values.shape)}: nothing for a token", where=_at(where, key), remedy="give one")
    if values.shape[0] != tokens:
        what = f"it has {values.shape[0]} values, and model_input has {tokens} tokens"
        raise DataError(what, where=_at(where, key), remedy="position i of model_input predicts target_tokens[i]")
    if values.shape != targets.shape:
        raise DataError(f"it is {list(values.shape)}, and {TARGETS} is {list(targets.shape)}", where=_at(where, key))


def _at(where: str, key: str) -> str:
    return f"{where}.loss_fn_inputs.{key}"


_LOW, _HIGH, _MASK = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
_SAMPLED, _ADVANTAGES = "logprobs", "advantages"


def _by_ratio(function: Callable[..., torch.Tensor], *names: str) -> Evaluate:
    """A loss of log-probabilities now, those of sampling, advantages and some settings."""
    return lambda logprobs, fields, bounds, settings: function(
        logprobs, fields[_SAMPLED], fields[_ADVANTAGES], *(settings[name] for name in names)
    )


def _with_advantage(fields: Fields) -> torch.Tensor:
    return fields[_ADVANTAGES] != 0


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            "cross_entropy",
            lambda logprobs, fields, bounds, settings: policy.weighted_cross_entropy(logprobs, fields[WEIGHTS]),
            lambda fields: (fields[WEIGHTS] != 0).reshape(len(fields[WEIGHTS]), -1).any(1),
            optional=(WEIGHTS,),
            soft=True,
        ),
        Loss(
            "importance_sampling",
            _by_ratio(policy.importance_sampling),
            _with_advantage,
            fields=(_SAMPLED, _ADVANTAGES),
        ),
        Loss(
            "ppo",
            _by_ratio(policy.ppo, _LOW, _HIGH),
            _with_advantage,
            fields=(_SAMPLED, _ADVANTAGES),
            settings={_LOW: 0.8, _HIGH: 1.2},
        ),
        Loss(
            "cispo",
            _by_ratio(policy.cispo, _LOW, _HIGH),
            _with_advantage,
            fields=(_SAMPLED, _ADVANTAGES),
            settings={_LOW: 0.0, _HIGH: 4.0},
        ),
        Loss(
            "dro",
            _by_ratio(policy.dro, "beta"),
            lambda fields: torch.ones_like(fields[_ADVANTAGES], dtype=torch.bool),
            fields=(_SAMPLED, _ADVANTAGES),
            settings={"beta": 0.05},
        ),
        Loss(
            "gspo",
            lambda logprobs, fields, bounds, settings: policy.gspo(
                logprobs, fields[_SAMPLED], fields[_ADVANTAGES], fields[_MASK], bounds, settings[_LOW], settings[_HIGH]
            ),
            lambda fields: (fields[_ADVANTAGES] != 0) | (fields[_MASK] != 0),
            fields=(_SAMPLED, _ADVANTAGES, _MASK),
            settings={_LOW: 0.8, _HIGH: 1.2},
        ),
    )
}
"""Name -> loss."""


def loss_named(name: str) -> Loss:
    """A loss of the table.

    Raises:
        ConfigError: there is none of this name.
    """
    if not isinstance(name, str) or name not in LOSSES:
        what = f"there is no loss {name!r}"
        raise ConfigError(
            what, where="loss_fn", remedy=f"there are {', '.join(LOSSES)}; others by forward_backward_custom"
        )
    return LOSSES[name]
