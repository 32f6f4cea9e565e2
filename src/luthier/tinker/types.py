"""What goes into and comes out of a training client, under the names that the `tinker` SDK uses.

The SDK's own objects may be given instead: what is read of one is its attributes, never its class.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from luthier.errors import ConfigError

_DTYPES = {"int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class TensorData:
    """Numbers with a shape.

    Args:
        data: a tensor, an array, or (nested) lists.
        dtype: int64, float32 or float64; that of the data when left out, lists of Python floats are float64.
        shape: of the data, where it is given flat.
    """

    def __init__(self, data: Any, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
        values = torch.as_tensor(data) if isinstance(data, torch.Tensor | np.ndarray) else _from_lists(data)
        if dtype is not None:
            values = values.to(_DTYPES[dtype])
        elif values.is_floating_point():
            values = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
        else:
            values = values.to(torch.int64)
        self._values = values.detach().cpu().reshape(tuple(shape) if shape is not None else values.shape)

    @staticmethod
    def from_torch(tensor: torch.Tensor) -> TensorData:
        return TensorData(tensor)

    @staticmethod
    def from_numpy(array: np.ndarray) -> TensorData:
        return TensorData(array)

    def to_torch(self) -> torch.Tensor:
        return self._values

    def to_numpy(self) -> np.ndarray:
        return self._values.numpy()

    def tolist(self) -> list[Any]:
        values: list[Any] = self._values.tolist()
        return values

    @property
    def data(self) -> list[Any]:
        """The values, flat."""
        return self._values.flatten().tolist()

    @property
    def dtype(self) -> str:
        return str(self._values.dtype).removeprefix("torch.")

    @property
    def shape(self) -> list[int]:
        return list(self._values.shape)

    def __repr__(self) -> str:
        return f"TensorData({self.tolist()}, dtype={self.dtype!r})"


def _from_lists(data: Any) -> torch.Tensor:
    array = np.asarray(data)
    return torch.from_numpy(array if array.size else array.astype(np.int64))


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A piece of text as token ids."""

    tokens: Sequence[int]
    type: str = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the model reads: chunks, one after the other."""

    chunks: Sequence[Any]

    @staticmethod
    def from_ints(tokens: Sequence[int]) -> ModelInput:
        return ModelInput([EncodedTextChunk(list(tokens))])

    @staticmethod
    def empty() -> ModelInput:
        return ModelInput([])

    def to_ints(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.tokens]

    def append(self, chunk: Any) -> ModelInput:
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([token]))

    @property
    def length(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Datum:
    """One document of a batch.

    Attributes:
        model_input: T tokens, or their ids.
        loss_fn_inputs: what the loss reads, each T long: `target_tokens`, position i of which is what position i of
            `model_input` predicts, and more by loss. Empty: cross-entropy of every next token of `model_input`.
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Attributes:
        rank: of each adapter.
        seed: of the first values of A; B is zero.
        train_mlp, train_attn, train_unembed: which linear layers are adapted, by what they do.
        alpha: numerator of the scale alpha / rank; 32 is Tinker's.
    """

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"{self.rank!r} is no whole number of 1 or more", where="rank")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"{self.alpha!r} is no number above 0", where="alpha")


@dataclass(frozen=True, slots=True)
class AdamParams:
    """How one optimizer step is taken: AdamW (https://arxiv.org/abs/1711.05101), all numbers anew at every step.

    Attributes:
        learning_rate: of this step.
        beta1, beta2: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate; of matrices, not of biases and norms.
        grad_clip_norm: gradients are scaled so that their norm is at most this; 0 = not at all.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @staticmethod
    def read(given: Any) -> AdamParams:
        """The same of any object with these attributes.

        Raises:
            ConfigError: one is missing, or is no number that it can be.
        """
        values: dict[str, float] = {}
        for name, (most, what) in _BOUNDS.items():
            value = getattr(given, name, None)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
                raise ConfigError(f"{value!r} is no number {what}", where=f"adam_params.{name}")
            values[name] = float(value)
        if np.float32(values["eps"]) == 0:  # which the weights have
            what = f"{values['eps']:g} is 0 in fp32, and would divide nothing by nothing where a gradient is 0"
            raise ConfigError(what, where="adam_params.eps", remedy="1e-12 is Tinker's")
        return AdamParams(**values)


_MOST = float(np.finfo(np.float32).max)
"""Beyond it a number is infinite where it meets the weights, which it would make so too."""
_BOUNDS = {
    "learning_rate": (_MOST, "of 0 or more that fp32 has"),
    "beta1": (1.0, "from 0 to below 1"),
    "beta2": (1.0, "from 0 to below 1"),
    "eps": (_MOST, "above 0 that fp32 has"),
    "weight_decay": (_MOST, "of 0 or more that fp32 has"),
    "grad_clip_norm": (math.inf, "of 0 or more"),
}


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """What a call of forward or forward_backward found.

    Attributes:
        loss_fn_outputs: for each datum `logprobs`, shaped as its target_tokens.
        metrics: "name:reduction" -> number; `loss:sum` is the plain sum over all tokens. Calls without weights also
            have `loss:mean`, over their `tokens:sum` valid targets.
        loss: what was differentiated: the mean of a call without weights, otherwise the sum.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]
    loss: float
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """What an optimizer step did: `gradient_norm:mean` is the norm before clipping."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """Where weights were written to."""

    path: str


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """Where weights were read from."""

    path: str


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    """Where weights for sampling were written to."""

    path: str


@dataclass(frozen=True, slots=True)
class ModelData:
    """What a model is: its architecture, its name and its tokenizer's."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True, slots=True)
class GetInfoResponse:
    """What a client trains; `lora_rank` is the smallest of the adapters' ranks."""

    model_data: ModelData
    model_id: str
    is_lora: bool | None = None
    lora_rank: int | None = None

    @property
    def model_name(self) -> str | None:
        return self.model_data.model_name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How texts are sampled.

    Attributes:
        max_tokens: at most so many new ones; as many as the model has positions for when left out.
        seed: sample i of a call has seed + i; drawn when left out.
        stop: strings or token ids that end a text; None: the model's own ends, an empty list: nothing.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the so many likeliest tokens; -1 for no limit.
        top_p: only the likeliest tokens that together have this probability.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A sampled text.

    Attributes:
        tokens: new ids, the ending included.
        logprobs: of each in the distribution that it was sampled from, so tempered; at temperature 0 the model's own.
        stop_reason: "stop" or "length".
        topk_logprobs: for each the likeliest (token, log-probability), if asked for.
        sequence_id: another one for every text.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    sequence_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def tokens_np(self) -> np.ndarray:
        return np.asarray(self.tokens, np.int32)

    @property
    def logprobs_np(self) -> np.ndarray:
        return np.asarray(self.logprobs, np.float32)


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """What came of a prompt.

    Attributes:
        sequences: one for each sample.
        prompt_logprobs: for each token of the prompt, None for the first, if asked for.
        topk_prompt_logprobs: for each token of the prompt what was likeliest in its place, if asked for.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
