"""From hidden states to log-probabilities and their gradients, never with a whole [tokens, vocabulary] tensor.

A head that is linear up to a scale, a cap and a bias (checked against the model's own forward when the head is made)
streams over the vocabulary. Any other head, an adapted one included, is the model's own forward on chunks of positions.
Under tensor parallelism each rank has the logits of its own tokens, and only sums go round.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal

import torch

from luthier.hf.head import HeadInfo, head_logits, linear_head
from luthier.losses.chunks import DEFAULT_CHUNK, LOGITS_CHUNK
from luthier.losses.cross_entropy import (
    LogprobsFunction,
    chunked_logprobs,
    cross_entropy_from_logits,
    streamed_cross_entropy,
    streamed_logprobs,
)
from luthier.losses.vocabulary_parallel import vocabulary_parallel_cross_entropy
from luthier.parallel.tensor import local, vocabulary_shard


class Head:
    """The output layer of one model.

    Args:
        model: a Transformers model, adapters in place.
        chunk: positions at a time; when left out, what suits the vocabulary streamed in tiles, and fewer where whole
            logits of a chunk are made.
        linear: what `linear_head` found before the model was laid out over ranks; found here when left out.
        dtype: of the whole model's weights; asked of the model when left out.
    """

    def __init__(
        self,
        model: Any,
        chunk: int | None = None,
        *,
        linear: HeadInfo | Literal["find"] | None = "find",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._weights = dtype or model.dtype
        self._chunk = chunk or DEFAULT_CHUNK
        self._logits_chunk = chunk or LOGITS_CHUNK
        self._linear = linear_head(model) if linear == "find" else linear
        self._temperature = 1.0

    def at(self, temperature: float) -> Head:
        """The head of the same model whose logits are divided by a temperature."""
        if temperature == 1.0:
            return self
        other = copy.copy(self)
        other._temperature = temperature
        if other._linear is not None and other._linear.softcap is None:
            other._linear = replace(other._linear, scale=other._linear.scale / temperature)
        else:  # a cap comes before the temperature
            other._linear = None
        return other

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of log-probabilities: fp32, or float64 for a float64 model."""
        return torch.float64 if self._weights == torch.float64 else torch.float32

    def cross_entropy(
        self, hidden: torch.Tensor, targets: torch.Tensor, coefficients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of coefficient x (-log p(target)), its gradient made on the way.

        Args:
            hidden: [n, hidden].
            targets: int64 [n].
            coefficients: [n], any sign.

        Returns:
            the loss (float64 scalar, differentiable) and the log-probabilities [n] (without gradient).
        """
        shard = vocabulary_shard(self._model)
        if self._linear is None:
            one = None if shard is None else shard.logprobs
            return cross_entropy_from_logits(self._logits, hidden, targets, coefficients, self._logits_chunk, one)
        hidden, weight, how = self._streamed(hidden, self._linear)
        if shard is not None:
            loss, found = vocabulary_parallel_cross_entropy(hidden, weight, targets, coefficients, shard, **how)
        else:
            loss, found = streamed_cross_entropy(hidden, weight, targets, coefficients, **how)
        return loss, found.to(self.dtype)

    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, for a loss that says later how much each counts.

        Args:
            hidden: [n, hidden].
            targets: int64 [n], or [n, K] for several at each position.

        Returns:
            of the targets' shape.
        """
        shard = vocabulary_shard(self._model)
        if self._linear is not None and shard is None and targets.dim() == 1:
            hidden, weight, how = self._streamed(hidden, self._linear)
            return streamed_logprobs(hidden, weight, targets, **how).to(self.dtype)
        one = None if shard is None else shard.logprobs
        return chunked_logprobs(self._logits, hidden, targets, self._logits_chunk, one)

    def scored(
        self, hidden: torch.Tensor, coefficients: torch.Tensor, score: LogprobsFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of coefficient x (-score), its gradient made on the way.

        Args:
            hidden: [n, hidden].
            coefficients: [n], any sign.
            score: score(logits, places) -> [m], of the logits [m, vocabulary] (or this rank's part of them) of a chunk,
                and its places [m] among the n.

        Returns:
            the loss (float64 scalar, differentiable) and the scores [n] (without gradient).
        """
        places = torch.arange(len(hidden), device=hidden.device)
        return cross_entropy_from_logits(self._logits, hidden, places, coefficients, self._logits_chunk, score)

    def _streamed(self, hidden: torch.Tensor, linear: HeadInfo) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """What streaming over the vocabulary takes: hidden states, the weight, all else of the head by name."""
        weight, bias = local(linear.weight), linear.bias
        how = {
            "bias": None if bias is None else local(bias),
            "scale": linear.scale,
            "soft_cap": linear.softcap,
            "chunk": self._chunk,
        }
        return hidden.to(weight.dtype), weight, how  # a head kept in fp32 works in fp32, as in the model's own forward

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocabulary], or to this rank's part of it, by the model's own forward."""
        logits = head_logits(self._model, hidden)
        return logits if self._temperature == 1.0 else logits / self._temperature
