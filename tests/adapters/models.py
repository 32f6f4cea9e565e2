"""Tiny models of plain Transformers with weights so large that a fault shows, and PEFT's adapters beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3Config

VOCABULARY = 67
PEFT_WARNINGS = (
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
)
"""What PEFT brings about by itself."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(kind: str) -> PreTrainedConfig:
    """llama, llama-tied, qwen3, qwen3-tied, gpt2 (tied), gpt2-untied or mixtral."""
    name, _, tie = kind.partition("-")
    if name == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tie != "untied",
        )
    sizes = _SIZES | {"tie_word_embeddings": tie == "tied"}
    if name == "llama":
        return LlamaConfig(**sizes, attention_bias=True)
    if name == "qwen3":
        return Qwen3Config(**sizes, head_dim=8)
    return MixtralConfig(**sizes, num_local_experts=4, sliding_window=None)


def tiny(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of this kind, the same weights at every call, in evaluation mode."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.5))
    if dtype == torch.float64 and kind == "mixtral":
        model.set_experts_implementation("eager")
    return model.eval()


def rows(count: int = 2, length: int = 11) -> torch.Tensor:
    """Token ids [count, length]."""
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    """What a model says of `rows()`, without gradients."""
    with torch.no_grad():
        result: torch.Tensor = model(rows(), use_cache=False).logits
    return result


def loss(model: Any) -> torch.Tensor:
    """A scalar in which every logit counts."""
    result: torch.Tensor = model(rows(), labels=rows(), use_cache=False).loss
    return result


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()


@torch.no_grad()
def disturb(model: Any) -> None:
    """Give every adapter matrix random values, B included, so that it changes the result."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
