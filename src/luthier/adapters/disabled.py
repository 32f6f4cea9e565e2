"""The base under its adapters, for as long as a block lasts: what DPO and GRPO compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from luthier.adapters.experts import adapted


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Within, every low-rank product has the scale 0, so that the model is its base; weights are not touched."""
    layers = [layer for _, layer in adapted(model)]
    specs = [layer.lora_spec for layer in layers]
    try:
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = replace(spec, alpha=0.0)
        yield
    finally:
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = spec
