"""Packed documents give what plain Transformers gives each alone, or packing is refused with a reason."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from luthier.batch import Batch, Sample
from luthier.hf.forward import hidden_states, packing_is_exact
from luthier.hf.head import head_logits
from luthier.hf.load import load_model
from luthier.hf.source import resolve

LENGTHS = (40, 3, 25, 1, 60)
EXACT = [
    *("llama", "qwen2", "qwen3", "gemma2", "cohere2", "granite", "gpt2", "phi", "mixtral", "mistral", "opt"),
    *("gpt_neox", "falcon", "gpt_bigcode", "phi3", "olmo2", "olmoe", "stablelm", "starcoder2", "gemma", "gemma3_text"),
    *("glm4", "smollm3", "ernie4_5", "helium", "arcee", "gpt_oss", "deepseek_v3", "qwen3_moe"),
]
REFUSED = ["bloom", "mpt", "mamba", "rwkv", "jamba", "qwen3_next", "recurrent_gemma"]


def loud(kind: str, dtype: str = "fp64") -> PreTrainedModel:
    """A debug model with large weights, so that a document that sees another shows."""
    model = load_model(resolve(f"debug:{kind}"), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(0.1 * noise)
    return model


def plain_logits(model: PreTrainedModel, documents: list[np.ndarray]) -> torch.Tensor:
    plain = copy.deepcopy(model)
    if plain.config._attn_implementation == "luthier":
        plain.set_attn_implementation("sdpa" if plain._supports_sdpa else "eager")
    return torch.cat([plain(torch.from_numpy(ids)[None], use_cache=False).logits[0] for ids in documents])


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(4, 490, length) for length in LENGTHS]


def packed(rows: list[np.ndarray]) -> Batch:
    return Batch.pack([Sample.from_ids(np.append(ids, 0), np.ones(len(ids) + 1)) for ids in rows])


@pytest.mark.parametrize("kind", EXACT)
@torch.no_grad()
def test_packed_equals_each_alone(kind: str) -> None:
    model = loud(kind)
    rows = documents()
    expected = plain_logits(model, rows)
    found = head_logits(model, hidden_states(model, packed(rows)))
    bound = 1e-6 if kind in ("gemma2", "gpt_oss", "deepseek_v3") else 1e-10  # these cast to fp32 inside
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    assert packing_is_exact(model) == (True, "")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_packed_is_refused_with_a_reason(kind: str) -> None:
    exact, reason = packing_is_exact(loud(kind))
    assert not exact
    assert reason


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
@torch.no_grad()
def test_one_document_alone_is_right_even_there(kind: str) -> None:
    model = loud(kind)
    rows = documents()[:1]
    expected = plain_logits(model, rows)
    found = head_logits(model, hidden_states(model, packed(rows)))
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_small_leak_in_bf16_is_found_too() -> None:
    model = load_model(resolve("debug:bloom"), dtype="bf16")  # its own small weights: far below bf16's resolution
    assert packing_is_exact(model)[0] is False


def test_the_probe_leaves_no_trace() -> None:
    model = load_model(resolve("debug:llama"))
    model.train()
    model.model.norm.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    assert packing_is_exact(model)[0]
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
