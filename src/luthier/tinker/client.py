"""LocalTrainingClient: Tinker's training calls in this process, over the training step that the recipes take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from luthier.config import ParallelConfig
from luthier.engine.build import Precision
from luthier.errors import CheckpointError, ConfigError, ModelError
from luthier.hf.tokenizer import load_tokenizer
from luthier.losses.table import loss_named
from luthier.tinker import saved
from luthier.tinker.build import build
from luthier.tinker.calls import Calls, CustomLoss
from luthier.tinker.copies import Copies
from luthier.tinker.futures import APIFuture, gives_future, gives_result
from luthier.tinker.sampler import SamplingClient, refuse_stability, snapshot
from luthier.tinker.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

_STATES, _SAMPLERS = "weights", "sampler_weights"
_UNWRITABLE = re.compile(r"[\0\ud800-\udfff]")
_LONGEST_NAME = 240
"""Bytes: while it is written a directory has a longer name beside its own, and disks take 255."""


class LocalTrainingClient(Calls):
    """A model in training. Every call is done when it returns, in the order of the calls, and returns a future. The
    `..._async` twins are coroutines of the same, as the SDK has them.

    On a layout every rank makes the same calls with the same data, and gets the same answers. Texts are sampled there
    from a copy: every rank holds the base model whole from the first sample on.

    Args:
        model: a causal language model of Transformers, changed in place, of which the adapters train, or without any
            all of it; or what `luthier train` calls a model (a Hub id, a directory, debug:TYPE); or a `TrainState`.
        lora: adapters to put on it; None where it carries them already, or trains whole.
        parallel: how a model that is named is laid out over the ranks of torch.distributed, as of `luthier train`
            ({"tp": 2}); None: this process has it whole, whatever other ranks do.
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
        parallel: ParallelConfig | Mapping[str, Any] | None = None,
        directory: str | Path = "tinker",
        tokens_per_microbatch: int = 4096,
        precision: Precision | None = None,
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        state = build(model, lora, parallel=parallel, precision=precision, device=device, seed=seed)
        super().__init__(state, tokens_per_microbatch)
        self.directory = Path(directory)
        self._copies = Copies(state, seed) if state.mesh is not None else None
        self._live = self._sampling_client(self.model)
        self._live_of = -1

    @property
    def model_id(self) -> str:
        """What the model is called."""
        return self.state.source.text

    def get_info(self) -> GetInfoResponse:
        """The model's name, and how it is adapted."""
        name, ranks = self.state.source.text, self.state.lora.ranks if self.state.lora is not None else ()
        data = ModelData(arch=self.state.outline.config.model_type, model_name=name, tokenizer_id=name)
        return GetInfoResponse(data, self.model_id, is_lora=bool(ranks), lora_rank=min(ranks, default=None))

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

    def optim_step(self, optim_params: Any = None, *, adam_params: Any = None) -> APIFuture[OptimStepResponse]:
        """Take one step with what the calls since the last one added up, and forget that.

        Args:
            optim_params: `AdamParams`, or anything with its attributes; its defaults when left out.
            adam_params: the same under its older name.

        Raises:
            UserError: by `result`: a number cannot be used, or a call of forward_backward of this step failed.
            NonFiniteError: by `result`: loss or gradient is not finite; weights and moments are then as before.
        """
        given = adam_params if optim_params is None else optim_params
        return APIFuture(lambda: self._optim_step(AdamParams() if given is None else given))

    def compute_logprobs(self, prompt: Any) -> APIFuture[Any]:
        """The log-probability of every token of a prompt after those before it, None for the first.

        Args:
            prompt: a ModelInput, a tensor or a list of token ids; or a list of ModelInputs, for a list of results.
        """
        return APIFuture(lambda: self._compute_logprobs(prompt))

    def sample(self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, **more: Any) -> APIFuture[Any]:
        """Sample from the weights as they are now; as `SamplingClient.sample`."""
        return APIFuture(lambda: self._live_client().sample(prompt, num_samples, sampling_params, **more).result())

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot", "inflight"] = "snapshot",
    ) -> APIFuture[SamplingClient]:
        """A client that samples from the weights as they are now, without a copy on disk.

        Args:
            name: is accepted and has no meaning, as in the SDK.
            retry_config: is accepted; nothing has to be tried again in process.
            record_stability_info: is refused: there is no loss that reads it.
            kind: snapshot: what trains is copied, and later steps change nothing; inflight: the weights in training.
        """

        def work() -> SamplingClient:
            refuse_stability(record_stability_info)
            if kind not in ("snapshot", "inflight"):
                raise ConfigError(f"{kind!r} is unknown", where="kind", remedy="use snapshot or inflight")
            if kind == "snapshot":
                return self._sampling_client(self._snapshot())
            if self._copies is not None:
                what = "on several ranks texts are sampled from copies of the weights"
                raise ConfigError(what, where="kind", remedy="use snapshot")
            return self._sampling_client(self.model)

        return APIFuture(work)

    def save_weights_for_sampler(
        self, name: str | Path, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Write what has been learnt, to sample from it later: adapters as PEFT's files, which vLLM reads too, or of a
        model that trains whole the model.

        Args:
            name: of a directory in the client's own `sampler_weights`; with a slash in it, the path of one.
            ttl_seconds: is accepted, and nothing is deleted in process.
            user_metadata: notes of your own, kept beside the weights.

        Raises:
            CheckpointError: by `result`: it is there already.
        """

        def work() -> SaveWeightsForSamplerResponse:
            path = self._new(name, _SAMPLERS, ttl_seconds, user_metadata)
            saved.save_for_sampler(self.state, path, user_metadata=user_metadata)
            return SaveWeightsForSamplerResponse(str(path))

        return APIFuture(work)

    def create_sampling_client(
        self, model_path: str | Path, retry_config: Any = None, record_stability_info: bool = False
    ) -> APIFuture[SamplingClient]:
        """A client that samples from weights that `save_weights_for_sampler` wrote, over this client's base model.

        Args:
            model_path: what that told, or the name.
            retry_config: is accepted; nothing has to be tried again in process.
            record_stability_info: is refused: there is no loss that reads it.

        Raises:
            CheckpointError: by `result`: there are none, or they are another model's.
        """

        def work() -> SamplingClient:
            refuse_stability(record_stability_info)
            base = self.model if self._copies is None else self._copies.base
            return self._sampling_client(saved.load_for_sampler(base, self._path(model_path, _SAMPLERS)))

        return APIFuture(work)

    def save_state(
        self,
        name: str | Path,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        *,
        adapters_only: bool = True,
    ) -> APIFuture[SaveWeightsResponse]:
        """Write adapters (or of a model that trains whole its weights) and optimizer.

        Args:
            name: of a directory in the client's own `weights`; with a slash in it, the path of one.
            ttl_seconds: is accepted, and nothing is deleted in process.
            overwrite: replace one that is there, all of it.
            user_metadata: notes of your own, kept beside the state.
            adapters_only: leave frozen weights out.

        Raises:
            CheckpointError: by `result`: it is there already, or cannot be written.
        """

        def work() -> SaveWeightsResponse:
            path = self._new(name, _STATES, ttl_seconds, user_metadata)
            saved.save(self.state, path, overwrite=overwrite, adapters_only=adapters_only, user_metadata=user_metadata)
            return SaveWeightsResponse(str(path))

        return APIFuture(work)

    def load_state(self, path: str | Path) -> APIFuture[LoadWeightsResponse]:
        """Read weights that `save_state` wrote; the optimizer begins anew, and gradients are dropped.

        Raises:
            CheckpointError: by `result`: there are none, or they are another model's.
        """
        return APIFuture(lambda: self._load(self._path(path, _STATES), optimizer=False))

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[LoadWeightsResponse]:
        """Read all that `save_state` wrote: training goes on as if it had never stopped."""
        return APIFuture(lambda: self._load(self._path(path, _STATES), optimizer=True))

    forward_async = gives_future(forward)
    forward_backward_async = gives_future(forward_backward)
    forward_backward_custom_async = gives_future(forward_backward_custom)
    optim_step_async = gives_future(optim_step)
    save_state_async = gives_future(save_state)
    load_state_async = gives_future(load_state)
    load_state_with_optimizer_async = gives_future(load_state_with_optimizer)
    save_weights_for_sampler_async = gives_future(save_weights_for_sampler)
    get_info_async = gives_future(get_info)
    create_sampling_client_async = gives_result(create_sampling_client)
    save_weights_and_get_sampling_client_async = gives_result(save_weights_and_get_sampling_client)

    def _sampling_client(self, model: Any) -> SamplingClient:
        seed = None if self._copies is None else self._copies.draw()
        return SamplingClient(model, self._tokenizer_if_any, self.state.source.text, seed)

    def _snapshot(self) -> Any:
        return snapshot(self.model) if self._copies is None else self._copies.snapshot()

    def _live_client(self) -> SamplingClient:
        if self._copies is not None and self._live_of != self._changes:
            self._live, self._live_of = self._sampling_client(self._snapshot()), self._changes
        return self._live

    def _new(self, name: str | Path, folder: str, ttl_seconds: int | None, notes: Any) -> Path:
        """Where a name is to lie; what goes with it is checked before anything is written."""
        if ttl_seconds is not None and not (isinstance(ttl_seconds, int | float) and ttl_seconds > 0):
            raise ConfigError(f"{ttl_seconds!r} is no number of seconds above 0", where="ttl_seconds")
        is_text = isinstance(notes or {}, Mapping) and all(
            isinstance(it, str) for pair in (notes or {}).items() for it in pair
        )
        if not is_text:
            raise ConfigError("it is no mapping of text to text", where="user_metadata")
        path = self._path(name, folder)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"there can be no directory of this name ({error.strerror})"
            raise CheckpointError(what, where=str(path), remedy="choose another name") from None
        return path

    def _path(self, name: str | Path, folder: str) -> Path:
        if not isinstance(name, str | Path):
            raise ConfigError(f"{name!r} is no name", where="name", remedy="give text or a path")
        text = str(name)
        if _UNWRITABLE.search(text) or any(len(part.encode()) > _LONGEST_NAME for part in text.split("/")):
            raise ConfigError(
                f"{text[:60]!r} cannot be a directory's name", where="name", remedy="choose a shorter one, of letters"
            )
        if isinstance(name, Path) or "/" in name:
            return Path(name)
        if not name or name.startswith("."):
            raise ConfigError(f"{name!r} cannot be a directory's name", where="name")
        return self.directory / folder / name

    def _tokenizer_if_any(self) -> Any:
        try:
            return self.get_tokenizer()
        except ModelError:
            return None
