"""From hidden states to logits by the model's own forward, whatever that does after its backbone.

A module that echoes given hidden states stands in the place of the backbone, and the model's own `forward` runs: soft
caps, scales and multipliers of every architecture are right without naming any. Where probes show that this forward
is one matrix, a scale and a soft cap, `linear_head` says so, and the loss can stream over the vocabulary instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from luthier.hf.anatomy import backbone_name


class _EchoOutput(BaseModelOutputWithPast):
    """Has the hidden states, and None for whatever else a forward asks of its backbone's output."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Echo(nn.Module):
    """Answers with the hidden states it was given, and passes for every part of the backbone."""

    def __init__(self, backbone: nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "_backbone", backbone)  # not as a submodule: it is not to be found in here
        object.__setattr__(self, "_hidden", hidden)

    def forward(self, *args: Any, **kwargs: Any) -> _EchoOutput:
        return _EchoOutput(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backbone, name)
        return self if isinstance(value, nn.Module) else value  # OPT's head calls model.decoder


def _own_forward(model: PreTrainedModel, hidden: torch.Tensor, modules: dict[str, nn.Module]) -> torch.Tensor:
    """The model's forward with the backbone echoing `hidden` [n, hidden] and `modules` in the place of others."""
    cls = type(model)
    name = backbone_name(model)
    proxy = object.__new__(cls)  # a shallow copy that shares every tensor; the model itself is not touched
    echo = _Echo(getattr(model, name), hidden[None])
    proxy.__dict__ = {**model.__dict__, "_modules": {**model._modules, name: echo, **modules}}
    logits = cls.forward(proxy, inputs_embeds=hidden[None], use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0]


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of some positions by the model's own forward.

    Args:
        model: the model that the hidden states came from.
        hidden: [n, hidden], what `forward.hidden_states` returned at these positions.

    Returns:
        [n, vocabulary], in the dtype that the model gives them.
    """
    return _own_forward(model, hidden, {})


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """A head that is `u = hidden @ weight.T + bias`, then `scale * u`, then `softcap * tanh(. / softcap)`.

    Attributes:
        module: the head itself; its weight is read when it is used, since loading, tying and sharding replace it.
        scale: factor of the logits; 1 where the model has none.
        softcap: bound of the logits; None where the model has none.
    """

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[vocabulary, hidden], the parameter itself (the embedding's, if tied)."""
        return self.module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """[vocabulary] or None."""
        return self.module.bias

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]; the plain form of what a streaming head computes."""
        logits = nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def linear_head(model: PreTrainedModel) -> HeadInfo | None:
    """What the head is, if it is one matrix with a scale and a soft cap at most, proven by probes of its own forward.

    Scale and soft cap are read off the forward itself, run in float64 on a small matrix in the head's place; then a
    random matrix in its place is compared on random hidden states. The head's own weight is not read, so the model may
    be on meta.

    Returns:
        None where the head is anything else: adapters in it, a transformation before it, several outputs.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or set(dict(head.named_parameters())) - {"weight", "bias"}:
        return None
    name = next((name for name, child in model.named_children() if child is head), None)
    if name is None:
        return None  # inside another module, which does something of its own
    try:
        scale, softcap = _measure(model, name, head.in_features)
        agrees = _agrees(model, name, head, scale, softcap)
    except _NotLinearError:
        return None
    return HeadInfo(head, scale, softcap) if agrees and not _others_take_part(model, head) else None


class _NotLinearError(Exception):
    """The forward is not of the form that `HeadInfo` can say."""


@torch.no_grad()
def _measure(model: PreTrainedModel, name: str, width: int) -> tuple[float, float | None]:
    """Scale and soft cap of a forward, by its answers to known logits."""
    # a matrix that just sums the hidden states, and hidden states that hold one number each
    probe = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    probe.weight.fill_(1.0)

    def answer(values: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(len(values), width, dtype=torch.float64)
        hidden[:, 0] = values
        return _answer(model, name, hidden, probe)[:, 0].double()

    small = torch.tensor([-3.0, -1.0, -0.25, 0.0, 0.5, 2.0, 7.0], dtype=torch.float64)
    here = answer(small)
    ratio = answer(torch.tensor([1e-3], dtype=torch.float64))[0] / 1e-3
    huge = answer(torch.tensor([1e9, -1e9], dtype=torch.float64))
    bounded = bool(huge[0] < 1e6) and bool(huge[0] == -huge[1]) and bool(huge[0] > 0)
    if bounded:
        cap = float(huge[0])
        scale = _round(float(torch.atanh(here[-1] / cap) * cap / small[-1])) if here[-1] < cap else float("nan")
        expected = torch.tanh(small * scale / cap) * cap
    else:
        cap = None
        scale = _round(float(here[-1] / small[-1]))
        expected = small * scale
    close = torch.allclose(here, expected, rtol=1e-5, atol=1e-7 * max(1.0, abs(scale)))
    if not close or abs(float(ratio) - scale) > 1e-3 * abs(scale) or scale == 0:
        raise _NotLinearError
    return scale, cap


def _round(value: float) -> float:
    """Take off the noise of forwards that answer in float32: the nearest number, or inverse, of few digits if close."""
    for digits in (3, 6):
        for candidate in (
            round(value, digits),
            1.0 / round(1.0 / value, digits) if round(1.0 / value, digits) else value,
        ):
            if candidate and abs(candidate - value) <= 2e-7 * abs(value):
                return candidate
    return value


@torch.no_grad()
def _agrees(model: PreTrainedModel, name: str, head: nn.Linear, scale: float, softcap: float | None) -> bool:
    """Whether the model's forward is of this form for a random matrix in the head's place, bias and all."""
    generator = torch.Generator().manual_seed(0)
    trial = nn.Linear(head.in_features, 7, bias=head.bias is not None, dtype=torch.float64)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    hidden = torch.randn(4, head.in_features, generator=generator, dtype=torch.float64)
    own = _answer(model, name, hidden, trial)
    ours = HeadInfo(trial, scale, softcap).logits(hidden)
    # some forwards compute in fp32 whatever they are given
    return own.shape == ours.shape and bool((own.double() - ours).abs().max() <= 1e-5 * own.abs().max().clamp(min=1e-6))


def _answer(model: PreTrainedModel, name: str, hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """Logits [n, outputs] of the model's forward with another matrix in the head's place.

    Raises:
        _NotLinearError: the forward cannot run so, or gives something else: none that `HeadInfo` can say.
    """
    try:
        logits = _own_forward(model, hidden, {name: head})
    except Exception as error:  # whatever it is, the forward does more than multiply by a matrix
        raise _NotLinearError from error
    if logits.shape != (len(hidden), head.out_features) or logits.is_meta:
        raise _NotLinearError
    return logits


def _others_take_part(model: PreTrainedModel, head: nn.Module) -> bool:
    """Whether a parameter outside the head has a say in the logits (one that is still zero or one would not show)."""
    backbone = getattr(model, backbone_name(model))
    inside = {id(p) for p in backbone.parameters()} | {id(p) for p in head.parameters()}
    others = [p for p in model.parameters() if id(p) not in inside]
    if not others:
        return False
    wanted = [p.requires_grad for p in others]
    try:
        for parameter in others:
            parameter.requires_grad_(True)
        weight = head.weight
        assert isinstance(weight, torch.Tensor)
        with torch.enable_grad():
            logits = _own_forward(model, torch.ones(1, weight.shape[1]).to(weight), {})
            if not logits.requires_grad:
                return False
            grads = torch.autograd.grad(logits.sum(), others, allow_unused=True)
        return any(grad is not None for grad in grads)
    finally:
        for parameter, flag in zip(others, wanted, strict=True):
            parameter.requires_grad_(flag)
