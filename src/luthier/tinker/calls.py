"""The arithmetic behind a client's calls: rows to gradients, gradients to weights, and what each call tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luthier.batch import NO_TOKEN
from luthier.engine.evaluate import logprobs_of
from luthier.engine.guards import first_bad_weight
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from luthier.errors import NonFiniteError, UserError, first_line
from luthier.losses.table import TARGETS, WEIGHTS, Loss, loss_named
from luthier.tinker import saved
from luthier.tinker.batches import Batches, output_of, own_loss
from luthier.tinker.build import refuse_merged
from luthier.tinker.futures import APIFuture
from luthier.tinker.gradients import Gradients
from luthier.tinker.rows import Row, check_length, read_prompt, read_rows
from luthier.tinker.types import AdamParams, ForwardBackwardOutput, LoadWeightsResponse, OptimStepResponse

CustomLoss = Callable[[Any, list[torch.Tensor]], Any]
"""loss(data, logprobs) -> scalar, or (scalar, {metric: number}); `logprobs` has one tensor for each datum."""


class Calls:
    """What a client does, at once; on a layout all ranks make the same calls.

    Args:
        state: what trains.
        tokens: most positions of a microbatch, unless a row is longer.
    """

    def __init__(self, state: TrainState, tokens: int) -> None:
        self.state = state
        self._tokens = tokens
        self._gradients = Gradients(state.trainable.values())
        self._loss = 0.0
        self._changes = 0
        """How often weights have changed."""
        self._refusal: str | None = None
        self._calls: list[APIFuture[ForwardBackwardOutput]] = []

    @property
    def model(self) -> Any:
        """The model itself; on a layout this rank's part of it."""
        return self.state.model

    def refuse_step(self, why: str) -> None:
        """Let the next `optim_step` refuse and drop what was added up: a call that belongs to it failed elsewhere."""
        self._refusal = why

    def _counted(self, work: Callable[[], ForwardBackwardOutput]) -> APIFuture[ForwardBackwardOutput]:
        """A call whose failure the next optimizer step must not pass over."""
        self._calls.append(APIFuture(work))
        return self._calls[-1]

    def _forward(
        self, data: Any, loss: Loss, config: Mapping[str, float] | None, rows: list[Row] | None = None
    ) -> ForwardBackwardOutput:
        settings = loss.settings_of(config)
        rows = rows if rows is not None else self._rows(data, loss)
        batches = Batches(rows, self._tokens, self.state, lambda row: (row.targets != NO_TOKEN).double())
        training = self.model.training
        self.model.eval()
        try:
            found = logprobs_of(self.state, batches.batches)
        finally:
            self.model.train(training)
        return output_of(rows, loss, settings, batches.by_row(found))

    def _forward_backward(self, data: Any, loss: Loss, config: Mapping[str, float] | None) -> ForwardBackwardOutput:
        refuse_merged(self.model)
        settings = loss.settings_of(config)
        rows = self._rows(data, loss)
        is_mean = loss.soft and not rows[0].has_weights
        valid = sum(int((row.targets != NO_TOKEN).sum()) for row in rows)
        done = False
        try:
            if not is_mean:
                self._gradients.take("sum")
            elif valid:
                self._gradients.make_room(valid)
            together = self._gradients.targets

            def weigh(row: Row) -> torch.Tensor:
                if is_mean:
                    return (row.targets != NO_TOKEN).double() / max(together, 1)
                return row.fields[WEIGHTS] if loss.soft else loss.counts(row.fields).double()

            batches = Batches(rows, self._tokens, self.state, weigh)
            own = own_loss(loss, settings, soft=any(row.targets.dim() == 2 for row in rows))
            found = forward_backward_all(self.state, batches.batches, own, all_logprobs=True)
            output = output_of(rows, loss, settings, batches.by_row([part.logprobs for part in found]))
            done = True
        finally:
            if not done:  # parts of a sum are no gradient of anything
                self._gradients.clear()
                self._loss, self._refusal = 0.0, "in the middle of it"
        self._loss += output.loss
        self.state.counters.rows += len(rows)
        self.state.counters.tokens += sum(len(row.tokens) for row in rows)
        return output

    def _custom(self, data: Any, loss_fn: CustomLoss) -> ForwardBackwardOutput:
        refuse_merged(self.model)
        if not callable(loss_fn):
            what = f"a {type(loss_fn).__name__} cannot be called"
            raise UserError(what, where="loss_fn", remedy="give the function itself: loss(data, logprobs)")
        loss = loss_named("cross_entropy")
        rows = self._rows(data, loss)
        found = self._forward(data, loss, None, rows).loss_fn_outputs
        leaves = [output["logprobs"].to_torch().clone().requires_grad_() for output in found]
        told = loss_fn(data, leaves)
        value, metrics = told if isinstance(told, tuple) and len(told) == 2 else (told, {})
        is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
        if not is_scalar or not value.requires_grad:
            raise UserError("it must return a scalar tensor made of the log-probabilities", where="loss_fn")
        own = _numbers(metrics)  # before anything is added: a call that fails leaves no gradient behind
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        given = [
            {
                "model_input": row.tokens,
                "loss_fn_inputs": {
                    TARGETS: row.targets,
                    WEIGHTS: torch.where(row.targets != NO_TOKEN, -slope, 0.0)
                    if slope is not None
                    else torch.zeros(row.targets.shape),
                },
            }
            for row, slope in zip(rows, slopes, strict=True)
        ]
        kept = [item for item, row in zip(given, rows, strict=True) if len(row.tokens)]
        surrogate = self._forward_backward(kept, loss, None).metrics["loss:sum"] if kept else 0.0
        total = float(value.detach())
        return ForwardBackwardOutput(found, {**own, "loss:sum": total, "surrogate_loss:sum": surrogate}, total)

    def _optim_step(self, given: Any) -> OptimStepResponse:
        refuse_merged(self.model)
        adam = AdamParams.read(given)
        unseen = next((call.unseen_failure for call in self._calls if call.unseen_failure is not None), None)
        why, self._refusal, self._calls = self._refusal, None, []
        if why is not None or unseen is not None:
            self._gradients.clear()
            self._loss = 0.0
            why = first_line(unseen) if unseen is not None else why
            what = f"a call of forward_backward failed ({why}), so this step is not taken"
            raise UserError(what, where="optim_step", remedy="mend the call and send the whole step again")
        for group in self.state.optimizer.param_groups:
            group["initial_lr"] = adam.learning_rate
            group["betas"], group["epsilon"] = (adam.beta1, adam.beta2), adam.eps
            group["weight_decay"] = adam.weight_decay if group["decays"] else 0.0
        self._gradients.add_up()
        loss, self._loss = self._loss, 0.0
        self._changes += 1
        update = optim_step(self.state, loss=loss, max_gradient_norm=adam.grad_clip_norm or None)
        if not update.applied:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {update.gradient_norm}"
            if (weight := first_bad_weight(self.model)) is not None:
                what += f", the weight {weight} itself is not finite"
            elif update.bad_gradient is not None:
                what += f", the first gradient that is not finite is that of {update.bad_gradient}"
            where = f"step {self.state.counters.step}"
            raise NonFiniteError(what, where=where, remedy="lower the learning rate, or look at the data")
        return OptimStepResponse({"gradient_norm:mean": update.gradient_norm})

    def _compute_logprobs(self, prompt: Any) -> Any:
        many = isinstance(prompt, Sequence) and not (prompt and isinstance(prompt[0], int | np.integer))
        prompts = prompt if many else [prompt]
        where = [f"prompt[{number}]" if many else "prompt" for number in range(len(prompts))]
        tokens = [read_prompt(one, self._vocabulary, place) for one, place in zip(prompts, where, strict=True)]
        rows = [Row(ids[:-1], {TARGETS: ids[1:]}, place) for ids, place in zip(tokens, where, strict=True)]
        for row in rows:
            check_length(row, self._positions)
        found = self._forward(None, loss_named("cross_entropy"), None, rows).loss_fn_outputs if rows else []
        values: list[list[float | None]] = [[None, *output["logprobs"].tolist()] for output in found]
        return values if many else values[0]

    def _load(self, path: Path, *, optimizer: bool) -> LoadWeightsResponse:
        refuse_merged(self.model)
        saved.load(self.state, path, optimizer=optimizer)
        self._changes += 1
        self._gradients.clear()
        self._loss, self._refusal, self._calls = 0.0, None, []
        return LoadWeightsResponse(str(path))

    def _rows(self, data: Any, loss: Loss) -> list[Row]:
        return read_rows(data, loss, self._vocabulary, self._positions)

    @property
    def _positions(self) -> int | None:
        return self.state.limits.positions if self.state.limits is not None else None

    @property
    def _vocabulary(self) -> int:
        limits = self.state.limits
        return limits.vocabulary if limits is not None else int(self.state.outline.config.get_text_config().vocab_size)


def _numbers(metrics: Any) -> dict[str, float]:
    """The metrics that a loss of one's own tells beside its value.

    Raises:
        UserError: they are no mapping of names to numbers.
    """
    try:
        return {str(key): float(number) for key, number in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        what = f"its metrics are no mapping of names to numbers ({first_line(error)})"
        raise UserError(what, where="loss_fn", remedy="return (loss, {name: number})") from None
