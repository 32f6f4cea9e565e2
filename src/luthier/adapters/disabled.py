"""The base under its adapters, for as long as a block lasts: what DPO and GRPO compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from luthier.adapters.experts import adapted
from luthier.adapters.rows import rows_of_all
from luthier.hf.gather import local_part, reshard
from luthier.hf.rows.virtual import plainly


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Within, the model is its base: every low-rank product has the scale 0, no output has another length, rows of
    tokens are as they were before the first step, and nothing stands in the place of text. What was taken out of the
    base to begin with (PiSSA) is in its adapter again, which is put back as it was."""
    taking = [layer for _, layer in adapted(model) if getattr(layer, "lora_first", None) is not None]
    if taking:
        with _as_it_began(model, taking), plainly(model):
            yield
        return
    layers = [layer for _, layer in adapted(model)]
    specs = [layer.lora_spec for layer in layers]
    rows = rows_of_all(model)
    try:
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = replace(spec, alpha=0.0, dora=False)
        for own in rows:
            own.on = False
        with plainly(model):
            yield
    finally:
        for own in rows:
            own.on = True
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = spec


@contextmanager
def _as_it_began(model: Any, layers: Sequence[Any]) -> Iterator[None]:
    """Within, adapters that took a part out of the base have that part, and nothing else."""
    reshard(model)  # or gathered weights would stay as they are
    specs = [layer.lora_spec for layer in layers]
    places = [local_part(matrix.weight) for layer in layers for matrix in (layer.lora_A, layer.lora_B)]
    first = [local_part(value) for layer in layers for value in layer.lora_first]
    kept = [place.clone() for place in places]
    rows = rows_of_all(model)
    try:
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = replace(spec, dora=False)
        for own in rows:
            own.on = False
        for place, value in zip(places, first, strict=True):
            place.copy_(value)
        yield
    finally:
        reshard(model)
        for place, value in zip(places, kept, strict=True):
            place.copy_(value)
        for own in rows:
            own.on = True
        for layer, spec in zip(layers, specs, strict=True):
            layer.lora_spec = spec
