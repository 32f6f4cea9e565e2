"""The training step as an API: Tinker's shape, in this process."""

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
