"""Finds the layouts of the catalogue of models: `python -m luthier.estimate.presets > .../layouts.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from luthier.config import RunConfig
from luthier.config.presets import Method, Preset, presets
from luthier.errors import ConfigError
from luthier.estimate.run import find_layouts

CLUSTER = "h100"
GPUS = (1, 2, 4, 8, 16, 32)
METHODS: dict[Method, Any] = {"full": None, "lora": {"rank": 16}}


def layouts(preset: Preset, method: Method) -> dict[int, dict[str, Any]]:
    """Number of GPUs -> degrees other than 1, and `activation_checkpointing` where there is any."""
    config = RunConfig.model_validate(
        {
            "model": preset.sizes,
            "data": {"sequence_length": preset.sequence_length},
            "adapter": METHODS[method],
            "train": {"precision": "bf16"},
        }
    )
    found = {}
    for gpus in GPUS:
        try:
            best = find_layouts(config, gpus, CLUSTER, keep=1)["layouts"][0]
        except ConfigError:  # it does not fit
            continue
        degrees = {name: degree for name, degree in best["degrees"].items() if degree > 1}
        checkpointing = best["activation_checkpointing"]
        found[gpus] = degrees | ({"activation_checkpointing": checkpointing} if checkpointing != "off" else {})
    return found


def table() -> Iterator[str]:
    """The lines of layouts.yaml."""
    yield f"# The fastest layouts on {CLUSTER} GPUs, written by `make presets` from `luthier estimate`: do not edit."
    for preset in presets().values():
        if preset.sizes is None:
            continue
        yield f"{preset.name}:"
        for method in METHODS:
            flow = yaml.safe_dump(layouts(preset, method), default_flow_style=True, sort_keys=False, width=1000)
            yield f"  {method}: {flow.strip()}"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
