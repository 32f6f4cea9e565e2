"""Continued pre-training: `method: pretrain`. The steps are those of `sft`; what differs is how rows are read, which
`PretrainConfig` says."""

from __future__ import annotations

from luthier.recipes.sft import measure, take_step, train

__all__ = ["measure", "take_step", "train"]
