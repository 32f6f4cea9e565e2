"""LocalTrainingClient: Tinker's training calls in this process, over the training step that the recipes take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from luthier.batch import NO_TOKEN
from luthier.engine.adopt import adopt
from luthier.engine.build import Precision, choose_device, choose_precision
from luthier.engine.evaluate import logprobs_of
from luthier.engine.guards import first_bad_weight
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from luthier.errors import ConfigError, ModelError, NonFiniteError, UserError, first_line
from luthier.hf.load import DTYPES, load_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.losses.table import TARGETS, WEIGHTS, Loss, loss_named
from luthier.optim.build import decays
from luthier.tinker import saved
from luthier.tinker.adapters import apply_lora, is_merged, report_of
from luthier.tinker.batches import Batches, output_of, own_loss
from luthier.tinker.futures import APIFuture
from luthier.tinker.gradients import Gradients
from luthier.tinker.rows import Row, read_prompt, read_rows
from luthier.tinker.sampler import SamplingClient, snapshot
from luthier.tinker.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    LoraConfig,
    OptimStepResponse,
    SaveWeightsResponse,
)

CustomLoss = Callable[[Any, list[torch.Tensor]], Any]
"""loss(data, logprobs) -> scalar, or (scalar, {metric: number}); `logprobs` has one tensor for each datum."""


class LocalTrainingClient:
    """A model in training. Every call is done when it returns, in the order of the calls, and returns a future.

    Args:
        model: a causal language model of Transformers, changed in place, of which the adapters train, or without any
            all of it; or what `luthier train` calls a model (a Hub id, a directory, debug:TYPE); or a `TrainState`.
        lora: adapters to put on it; None where it carries them already, or trains whole.
        directory: where `save_state` writes names.
        tokens_per_microbatch: how many positions run at once; it changes no result beyond rounding.
        precision: fp32, bf16 or fp64, of a model that is named; what the device is fast at when left out.
        device: of a model that is named.
        seed: of random weights of a debug model and of stochastic rounding.

    Raises:
        UserError: the model cannot be used, or nothing of it trains.
    """

    def __init__(
        self,
        model: Any,
        lora: LoraConfig | None = None,
        *,
        directory: str | Path = "tinker",
        tokens_per_microbatch: int = 4096,
        precision: Precision | None = None,
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(model, TrainState):
            self.state = model
        else:
            source = resolve(model) if isinstance(model, str) else None
            if source is not None:
                where = choose_device(device)
                model = load_model(source, dtype=DTYPES[choose_precision(precision, where)], device=where, seed=seed)
            if lora is not None:
                apply_lora(model, lora)
            _refuse_merged(model)
            self.state = adopt(model, lora=report_of(model), source=source, seed=seed)
        self.directory = Path(directory)
        self._tokens = tokens_per_microbatch
        self._gradients = Gradients(self.state.trainable.values())
        self._live = SamplingClient(self.model, self._tokenizer_if_any)
        self._loss = 0.0
        self._refusal: str | None = None
        self._calls: list[APIFuture[ForwardBackwardOutput]] = []
        names = {parameter: name for name, parameter in self.state.model.named_parameters()}
        for group in self.state.optimizer.param_groups:
            if group["rule"] != "adamw":
                what = f"its optimizer is {group['rule']}, and optim_step takes the numbers of Adam"
                raise ConfigError(what, where="optimizer.name", remedy="build the state with adamw")
            group["decays"] = bool(group["params"]) and decays(names[group["params"][0]], group["params"][0])

    @property
    def model(self) -> Any:
        """The model itself."""
        return self.state.model

    def get_tokenizer(self) -> Any:
        """The tokenizer that belongs to the model."""
        if self.state.tokenizer is None:
            self.state.tokenizer = load_tokenizer(self.state.source)
        return self.state.tokenizer

    def forward(
        self, data: Any, loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`, without gradients or dropout."""
        return APIFuture(lambda: self._forward(data, loss_named(loss_fn), loss_fn_config))

    def forward_backward(
        self, data: Any, loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of a loss to what earlier calls added.

        Args:
            data: a Datum, a ModelInput, token ids [T] or [rows, T], a dict with `input_ids` (and `labels`,
                `attention_mask`) or with `model_input` and `loss_fn_inputs`, or a list of these.
            loss_fn: a name of `luthier.losses.table.LOSSES`. Every loss is a plain sum over tokens and rows, but for
                cross_entropy without weights: that is the mean over the valid targets of all such calls of a step.
            loss_fn_config: settings of the loss.

        Raises:
            UserError: by `result`: something of the data or settings cannot be used; it is named.
        """
        return self._counted(lambda: self._forward_backward(data, loss_named(loss_fn), loss_fn_config))

    def forward_backward_custom(self, data: Any, loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """A loss of one's own, by autograd through log-probabilities: one forward pass for these, and one call of
        forward_backward whose weights are the loss's gradient.

        Args:
            data: a list of Datums with `target_tokens`, or whatever `forward_backward` takes.
            loss_fn: called with the data and the log-probabilities of each row.
        """
        return self._counted(lambda: self._custom(data, loss_fn))

    def optim_step(self, adam_params: Any = None) -> APIFuture[OptimStepResponse]:
        """Take one step with what the calls since the last one added up, and forget that.

        Args:
            adam_params: `AdamParams`, or anything with its attributes; its defaults when left out.

        Raises:
            UserError: by `result`: a number cannot be used, or a call of forward_backward of this step failed.
            NonFiniteError: by `result`: loss or gradient is not finite; weights and moments are then as before.
        """
        return APIFuture(lambda: self._optim_step(AdamParams() if adam_params is None else adam_params))

    def compute_logprobs(self, prompt: Any) -> APIFuture[Any]:
        """The log-probability of every token of a prompt after those before it, None for the first.

        Args:
            prompt: a ModelInput, a tensor or a list of token ids; or a list of ModelInputs, for a list of results.
        """
        return APIFuture(lambda: self._compute_logprobs(prompt))

    def sample(self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, **more: Any) -> APIFuture[Any]:
        """Sample from the weights as they are now; as `SamplingClient.sample`."""
        return self._live.sample(prompt, num_samples, sampling_params, **more)

    def save_weights_and_get_sampling_client(
        self, kind: Literal["snapshot", "inflight"] = "snapshot"
    ) -> APIFuture[SamplingClient]:
        """A client that samples from the weights as they are now, without a copy on disk.

        Args:
            kind: snapshot: what trains is copied, and later steps change nothing; inflight: the weights in training.
        """

        def work() -> SamplingClient:
            if kind not in ("snapshot", "inflight"):
                raise ConfigError(f"{kind!r} is unknown", where="kind", remedy="use snapshot or inflight")
            model = self.model if kind == "inflight" else snapshot(self.model)
            return SamplingClient(model, self._tokenizer_if_any)

        return APIFuture(work)

    def save_state(
        self,
        name: str | Path,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        *,
        adapters_only: bool = True,
    ) -> APIFuture[SaveWeightsResponse]:
        """Write adapters (or of a model that trains whole its weights) and optimizer.

        Args:
            name: of a directory in the client's own; with a slash in it, the path of one.
            ttl_seconds: is accepted, and nothing is deleted in process.
            overwrite: replace one that is there, all of it.
            adapters_only: leave frozen weights out.

        Raises:
            CheckpointError: by `result`: it is there already, or cannot be written.
        """

        def work() -> SaveWeightsResponse:
            if ttl_seconds is not None and not ttl_seconds > 0:
                raise ConfigError(f"{ttl_seconds!r} is no number of seconds above 0", where="ttl_seconds")
            path = self._path(name)
            saved.save(self.state, path, overwrite=overwrite, adapters_only=adapters_only)
            return SaveWeightsResponse(str(path))

        return APIFuture(work)

    def load_state(self, path: str | Path) -> APIFuture[LoadWeightsResponse]:
        """Read weights that `save_state` wrote; the optimizer begins anew, and gradients are dropped.

        Raises:
            CheckpointError: by `result`: there are none, or they are another model's.
        """
        return APIFuture(lambda: self._load(path, optimizer=False))

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[LoadWeightsResponse]:
        """Read all that `save_state` wrote: training goes on as if it had never stopped."""
        return APIFuture(lambda: self._load(path, optimizer=True))

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
        rows = rows if rows is not None else read_rows(data, loss, self._vocabulary)
        batches = Batches(rows, self._tokens, self.state, lambda row: (row.targets != NO_TOKEN).double())
        training = self.model.training
        self.model.eval()
        try:
            found = logprobs_of(self.state, batches.batches)
        finally:
            self.model.train(training)
        return output_of(rows, loss, settings, batches.by_row(found))

    def _forward_backward(self, data: Any, loss: Loss, config: Mapping[str, float] | None) -> ForwardBackwardOutput:
        _refuse_merged(self.model)
        settings = loss.settings_of(config)
        rows = read_rows(data, loss, self._vocabulary)
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
        _refuse_merged(self.model)
        loss = loss_named("cross_entropy")
        rows = read_rows(data, loss, self._vocabulary)
        found = self._forward(data, loss, None, rows).loss_fn_outputs
        leaves = [output["logprobs"].to_torch().clone().requires_grad_() for output in found]
        told = loss_fn(data, leaves)
        value, metrics = told if isinstance(told, tuple) else (told, {})
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise UserError("it must return a scalar tensor made of the log-probabilities", where="loss_fn")
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
        if kept:
            self._forward_backward(kept, loss, None)
        named = {key if ":" in key else f"{key}:mean": float(number) for key, number in metrics.items()}
        total = float(value.detach())
        return ForwardBackwardOutput(found, {"loss:sum": total, **named}, total)

    def _optim_step(self, given: Any) -> OptimStepResponse:
        _refuse_merged(self.model)
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
        found = self._forward(None, loss_named("cross_entropy"), None, rows).loss_fn_outputs if rows else []
        values: list[list[float | None]] = [[None, *output["logprobs"].tolist()] for output in found]
        return values if many else values[0]

    def _load(self, given: str | Path, *, optimizer: bool) -> LoadWeightsResponse:
        _refuse_merged(self.model)
        path = self._path(given)
        saved.load(self.state, path, optimizer=optimizer)
        self._gradients.clear()
        self._loss, self._refusal, self._calls = 0.0, None, []
        return LoadWeightsResponse(str(path))

    def _path(self, name: str | Path) -> Path:
        if isinstance(name, Path) or "/" in name:
            return Path(name)
        if not name or name.startswith("."):
            raise ConfigError(f"{name!r} cannot be a directory's name", where="name")
        return self.directory / name

    def _tokenizer_if_any(self) -> Any:
        try:
            return self.get_tokenizer()
        except ModelError:
            return None

    @property
    def _vocabulary(self) -> int:
        limits = self.state.limits
        return limits.vocabulary if limits is not None else int(self.state.outline.config.get_text_config().vocab_size)


def _refuse_merged(model: Any) -> None:
    if is_merged(model):
        what = "its adapters were merged into its weights, so nothing is left to train"
        raise ModelError(what, where="model", remedy="train first and merge last, or apply_lora again")
