"""The kinds of adapters beside LoRA, a model for each, and the union of all."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from luthier.config.base import PathText, Section
from luthier.config.sections import LoraConfig


class _Learned(Section):
    start_from: PathText | None = None
    """A directory with PEFT files (adapter_config.json, adapter_model.safetensors) to go on from."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of what learns; the base weight's when left out."""


class PromptConfig(_Learned):
    """Virtual tokens before every document, whose embeddings alone train (Lester et al. 2021,
    https://arxiv.org/abs/2104.08691)."""

    kind: Literal["prompt"]
    num_virtual_tokens: PositiveInt = 20
    init: Literal["vocabulary", "random"] = "vocabulary"
    """First values: rows of the embedding drawn by the seed, or normal with deviation 1 as PEFT's."""


class PrefixConfig(_Learned):
    """Keys and values before every document in every layer (Li and Liang 2021, https://arxiv.org/abs/2101.00190)."""

    kind: Literal["prefix"]
    num_virtual_tokens: PositiveInt = 20
    projection: bool = False
    """Train them through a small network, which files and exports hold the result of."""
    encoder_hidden_size: PositiveInt | None = None
    """Width of that network; the model's own when left out."""


class AdaptionPromptConfig(_Learned):
    """LLaMA-Adapter: prompts that the upper layers attend to beside the text, behind a gate that begins closed (Zhang
    et al. 2023, https://arxiv.org/abs/2303.16199)."""

    kind: Literal["adaption_prompt"]
    adapter_len: PositiveInt = 10
    """Prompts of each layer."""
    adapter_layers: PositiveInt | None = None
    """How many of the uppermost layers have prompts; all when left out."""


def _kind(value: Any) -> Any:
    return {"kind": "lora", **value} if isinstance(value, dict) else value


AdapterConfig = Annotated[
    Annotated[LoraConfig | PromptConfig | PrefixConfig | AdaptionPromptConfig, Field(discriminator="kind")],
    BeforeValidator(_kind),
]
"""A mapping without a kind is LoRA's."""
