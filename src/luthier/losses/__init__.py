"""Losses: pure functions of log-probabilities, targets and weights; nothing here knows a model."""

from luthier.losses.cross_entropy import chunked_logprobs, cross_entropy_from_logits, streamed_cross_entropy

__all__ = ["chunked_logprobs", "cross_entropy_from_logits", "streamed_cross_entropy"]
