"""`debug:TYPE` for every architecture, the same for a seed."""

from __future__ import annotations

import pytest
import torch

from luthier.errors import ModelError
from luthier.hf.load import load_model
from luthier.hf.source import load_config, resolve
from luthier.hf.tiny import causal_types, debug_config, debug_tokenizer

SOME = ["llama", "qwen3", "gemma2", "cohere2", "granite", "gpt2", "phi", "mixtral", "mistral", "opt", "falcon", "mamba"]


def test_nearly_every_type_can_be_shrunk() -> None:
    failed = []
    for kind in causal_types():
        try:
            config = debug_config(kind).get_text_config(decoder=True)
        except ModelError:
            failed.append(kind)
            continue
        assert getattr(config, "vocab_size", len(debug_tokenizer())) == len(debug_tokenizer()), kind
    assert len(failed) <= 6, failed


@pytest.mark.parametrize("kind", SOME)
def test_a_debug_model_is_small_and_the_same_for_a_seed(kind: str) -> None:
    first, second = (load_model(resolve(f"debug:{kind}"), seed=7) for _ in range(2))
    other = load_model(resolve(f"debug:{kind}"), seed=8)
    assert sum(p.numel() for p in first.parameters()) < 1_000_000
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_layers_of_every_kind_are_kept() -> None:
    assert set(debug_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert load_config(resolve("debug:mistral")).sliding_window == 16


def test_fields_can_be_changed() -> None:
    assert debug_config("granite", logits_scaling=8.0).logits_scaling == 8.0
    with pytest.raises(ModelError, match="no tiny mixtral can be made"):
        debug_config("mixtral", hidden_act=7)
