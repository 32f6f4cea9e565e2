"""The training step as an API: Tinker's shape, in this process. Names are imported when they are asked for, since the
front of the server (`server/app.py`) needs neither Transformers nor a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luthier.tinker.adapters import adapter_state_dict, apply_lora, iter_lora_modules, merge_adapters
    from luthier.tinker.client import LocalTrainingClient
    from luthier.tinker.futures import APIFuture
    from luthier.tinker.sampler import SamplingClient
    from luthier.tinker.types import (
        AdamParams,
        Datum,
        EncodedTextChunk,
        ForwardBackwardOutput,
        GetInfoResponse,
        LoadWeightsResponse,
        LoraConfig,
        ModelInput,
        OptimStepResponse,
        SampledSequence,
        SampleResponse,
        SamplingParams,
        SaveWeightsForSamplerResponse,
        SaveWeightsResponse,
        TensorData,
    )

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "LoadWeightsResponse",
    "LocalTrainingClient",
    "LoraConfig",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "TensorData",
    "adapter_state_dict",
    "apply_lora",
    "iter_lora_modules",
    "merge_adapters",
]

_HOMES = {
    "adapters": ["adapter_state_dict", "apply_lora", "iter_lora_modules", "merge_adapters"],
    "client": ["LocalTrainingClient"],
    "futures": ["APIFuture"],
    "sampler": ["SamplingClient"],
}
"""Modules -> the names that come from them; the rest are of `types`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "types")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
