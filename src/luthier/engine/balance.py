"""Keep a mixture's experts equally busy: by the auxiliary loss, or by moving the biases of its routers.

Both look at the whole global batch, so neither depends on the layout. The auxiliary loss needs the load of the whole
batch before the first backward pass: a step of several microbatches, or through a pipeline, first runs them forward
without gradients to count. With one microbatch a rank its own forward pass has counted by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luthier.config.sections import MoeConfig
from luthier.errors import ConfigError
from luthier.hf import routing
from luthier.hf.gather import local_part
from luthier.hf.shards import own_part
from luthier.losses.load_balancing import Load, logits_gradient
from luthier.parallel.mesh import Mesh


class Balance:
    """What is known of the experts' load, and what is done about it; `engine.build` makes one.

    Args:
        model: with its weights; watched from now on.
        coefficient: of the auxiliary loss; 0 for none.
        rate: by which biases move; None for not at all.
        mesh: of a run on several ranks.

    Attributes:
        auxiliary: the auxiliary loss of the last batch, without its coefficient; NaN before the first.
    """

    def __init__(self, model: Any, coefficient: float, rate: float | None, mesh: Mesh | None) -> None:
        self._model, self._mesh = model, mesh
        self.coefficient, self._rate = coefficient, rate
        self.auxiliary = float("nan")
        self._load: Load | None = None
        self._slopes: Tensor | None = None
        self._counting = self._training = False
        self._biases = routing.find_biases(model) if rate else {}
        self._choices: dict[str, Tensor] = {}
        if coefficient:
            self._top_k = routing.experts_per_token(model)
            routing.balance_routers(model, routing.find_routers(model), self._hand_on)
        routing.watch_choices(model, tuple(self._biases), self._saw_choices)

    @staticmethod
    def coefficient_of(model: Any, settings: MoeConfig, adapted: bool) -> float:
        """The auxiliary loss's coefficient; refuses what cannot be, before weights are read.

        Args:
            model: whole, on meta.
            settings: what the user wants.
            adapted: the model carries adapters.

        Raises:
            ConfigError: the model has no such loss, or no biases, or its biases would not be kept.
        """
        asked = settings.aux_loss
        coefficient = routing.auxiliary_loss_of(model) if asked is None else asked
        biases = routing.find_biases(model)
        if coefficient and (fault := routing.auxiliary_loss_fault(model, _loss_of)):
            remedy = "use moe.bias_update_rate, or leave it out" if biases else "leave it out"
            raise ConfigError(f"{type(model).__name__} cannot have it: {fault}", where="moe.aux_loss", remedy=remedy)
        if settings.bias_update_rate:
            where = "moe.bias_update_rate"
            if not biases:
                what = f"the routers of {type(model).__name__} have no biases that choose experts"
                raise ConfigError(what, where=where, remedy="use moe.aux_loss, or leave it out")
            if adapted:
                what = "biases are no part of an adapter, whose files would not hold them"
                raise ConfigError(what, where=where, remedy="leave it out, or train the whole model")
        return coefficient

    @property
    def counts(self) -> bool:
        """Whether forward passes count the load now, which a backward pass has to `settle` first."""
        return self._counting and bool(self.coefficient)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forward passes within count the load of the batch, and change nothing: random streams are put back."""
        devices = [self._device] if self._device.type == "cuda" else []
        self._load, self._counting = None, True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                yield
        finally:
            self._counting = False
        self.settle()

    @contextmanager
    def training(self, *, counts: bool) -> Iterator[None]:
        """Forward passes within are those of the step.

        Args:
            counts: they count the load of the batch too; `settle` comes before the backward pass.
        """
        self._training = True
        if counts:
            self._load, self._counting = None, True
        try:
            yield
        finally:
            self._training = self._counting = False

    def settle(self) -> None:
        """Add up the load of all ranks, which backward passes need. All ranks call it."""
        if not self.coefficient:
            return
        if self._load is None:  # a stage without routers
            nothing = torch.zeros(2 * routing.experts_of(self._model) + 1, dtype=torch.float64, device=self._device)
            self._load = Load.unflat(nothing)
        load = Load.unflat(self._over_all(self._load.flat(), stages=True))
        self.auxiliary = float(load.loss)
        self._slopes_like(load.chosen).copy_(load.slopes * self.coefficient)

    @torch.no_grad()
    def move_biases(self, applied: bool) -> None:
        """After an optimizer step: lift the bias of each expert that was chosen less than the mean, lower the others'.

        bias += rate * sign(mean - chosen), counted over all tokens since the last step (Wang et al. 2024,
        https://arxiv.org/abs/2408.15664). All ranks call it.

        Args:
            applied: the step changed weights; otherwise what was counted is forgotten.
        """
        for experts, name in self._biases.items():
            chosen = self._choices.pop(experts, None)
            owner, _, last = name.rpartition(".")
            bias: Tensor = getattr(self._model.get_submodule(owner), last)
            if not applied:
                continue
            if chosen is None:
                chosen = torch.zeros(bias.numel(), dtype=torch.float64, device=self._device)
            chosen = self._over_all(chosen, stages=False)
            change = (self._rate or 0.0) * (chosen.mean() - chosen).sign()
            local_part(bias).add_(own_part(bias, change.view(bias.shape).to(bias.dtype)))

    def _hand_on(self, value: Tensor, logits: Tensor, counted: Tensor | None) -> Tensor:
        """Count what a router does, and let its logits get their gradient of the auxiliary loss by way of `value`."""
        if counted is not None and self._counting:
            load = Load.of(logits, counted, self._top_k)
            self._load = load if self._load is None else self._load + load
        repeated = counted is None
        if not (torch.is_grad_enabled() and logits.requires_grad) or not (self._training or repeated):
            return value
        handed: Tensor = _Balanced.apply(value, logits, counted, self._slopes_like(logits))
        return handed

    def _saw_choices(self, experts: str, chosen: Tensor) -> None:
        if self._training:
            self._choices[experts] = self._choices.get(experts, 0.0) + chosen

    def _slopes_like(self, experts: Tensor) -> Tensor:
        """Where the slopes lie, which backward passes read."""
        if self._slopes is None:
            self._slopes = torch.zeros(experts.shape[-1], dtype=torch.float64, device=experts.device)
        return self._slopes

    def _over_all(self, value: Tensor, *, stages: bool) -> Tensor:
        """Sum over ranks that hold other tokens, or with `stages` other layers; those of tp hold the same."""
        mesh = self._mesh
        if mesh is None:
            return value
        value = mesh.sum(value)
        for ring in (mesh.cp, mesh.pp if stages else None):
            if ring is not None:
                dist.all_reduce(value, group=ring.get_group())
        return value

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device


def _loss_of(layers: Sequence[Tensor], counted: Tensor, top_k: int) -> Tensor:
    first, *rest = (Load.of(logits, counted, top_k) for logits in layers)
    return sum(rest, start=first).loss


class _Balanced(torch.autograd.Function):
    """Hands a value on, and in the backward pass adds the auxiliary loss's gradient to the logits'."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, counted: Tensor | None, slopes: Tensor) -> Tensor:
        # Of a repeated pass only the logits are used: what counts, and where the slopes will lie, the first has kept.
        ctx.save_for_backward(logits)
        ctx.counted, ctx.slopes = counted, slopes
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return gradient, logits_gradient(logits, ctx.counted, ctx.slopes), None, None
