"""The models that are proved by name: their public configs, made small with the options that change the mathematics."""

from __future__ import annotations

from typing import Any

from transformers import (
    ArceeConfig,
    Ernie4_5Config,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from luthier.hf.debug.shrink import shrink


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _theta(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096}

PUBLIC: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B": LlamaConfig(
        **_sizes(2048, 8192, 16, 32, 8, 128256), head_dim=64, **_theta(5e5, **_LLAMA3), tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "phi-2": PhiConfig(
        **_sizes(2560, 10240, 32, 32, 32, 51200), **_theta(1e4, partial_rotary_factor=0.4), hidden_act="gelu_new"
    ),
    "Qwen2.5-7B": Qwen2Config(**_sizes(3584, 18944, 28, 28, 4, 152064), **_theta(1e6)),
    "Mistral-7B-v0.1": MistralConfig(**_sizes(4096, 14336, 32, 32, 8, 32000), **_theta(1e4), sliding_window=4096),
    "Seed-Coder-8B": LlamaConfig(**_sizes(4096, 14336, 32, 32, 8, 155136), head_dim=128, **_theta(5e5)),
    "Qwen3-4B": Qwen3Config(
        **_sizes(2560, 9728, 36, 32, 8, 151936), head_dim=128, **_theta(5e6), tie_word_embeddings=True
    ),
    "AFM-4.5B": ArceeConfig(**_sizes(2560, 18432, 36, 20, 4, 128004), head_dim=128, **_theta(1e4, **_YARN),
        max_position_embeddings=65536),
    "granite-3b-code": LlamaConfig(
        **_sizes(2560, 10240, 32, 32, 32, 49152), **_theta(1e4), attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "ERNIE-4.5-0.3B": Ernie4_5Config(
        **_sizes(1024, 3072, 18, 16, 2, 103424), head_dim=128, **_theta(5e5), tie_word_embeddings=True
    ),
    "helium-1-2b": HeliumConfig(**_sizes(2560, 7040, 24, 20, 20, 48000), head_dim=128, **_theta(1e5)),
    "OLMo-7B": OlmoConfig(**_sizes(4096, 11008, 32, 32, 32, 50304), **_theta(1e4), clip_qkv=None),
    "OLMo-7B clipped": OlmoConfig(**_sizes(4096, 11008, 32, 32, 32, 50304), **_theta(1e4), clip_qkv=1.5),
    "Ministral-8B": MistralConfig(
        **_sizes(4096, 12288, 36, 32, 8, 131072), head_dim=128, **_theta(1e8), sliding_window=32768
    ),
}  # fmt: skip
"""The twelve, one of them with clipped projections too (at a bound that the small model reaches)."""


def small(name: str, layers: int = 3) -> PreTrainedConfig:
    """One of them as a toy: an odd number of layers, so that two stages differ."""
    return shrink(PUBLIC[name], layers=layers)
