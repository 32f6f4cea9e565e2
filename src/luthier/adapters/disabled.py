"""The base under its adapters, for as long as a block lasts: what DPO and GRPO compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from luthier.adapters.experts import adapted
from luthier.adapters.rows import rows_of_all
from luthier.hf.virtual import plainly


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Within, the model is its base: every low-rank product has the scale 0, rows of tokens are as they were before the
    first step, and nothing stands in the place of text. Weights are not touched."""
    layers = [layer for _, layer in adapted(model)]
    specs = [layer.lora_spec for layer in layers]
    rows = rows_of_all(model)
    try:
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = replace(spec, alpha=0.0)
        for own in rows:
            own.on = False
        with plainly(model):
            yield
    finally:
        for own in rows:
            own.on = True
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = spec
