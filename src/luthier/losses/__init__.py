"""Losses: pure functions of log-probabilities, targets and weights; nothing here knows a model."""

from luthier.losses.cross_entropy import (
    DEFAULT_CHUNK,
    LOGITS_CHUNK,
    chunked_logprobs,
    cross_entropy_from_logits,
    streamed_cross_entropy,
)

__all__ = ["DEFAULT_CHUNK", "LOGITS_CHUNK", "chunked_logprobs", "cross_entropy_from_logits", "streamed_cross_entropy"]
