"""How much of the logits is made at a time. Imports no torch: an estimate needs none."""

DEFAULT_CHUNK = 1024
"""Positions at a time: large matrix products, and the weight is read once for most rows of a microbatch."""
LOGITS_CHUNK = 256
"""Positions at a time where a chunk of logits is whole."""
