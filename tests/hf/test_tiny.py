"""`debug:TYPE` for every architecture, the same for a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig, Qwen3Config

from luthier.errors import ModelError
from luthier.hf.debug.shrink import VOCABULARY, shrink
from luthier.hf.debug.tiny import causal_types, debug_config, debug_tokenizer
from luthier.hf.kinds import never_causal, not_causal
from luthier.hf.load import load_model
from luthier.hf.source import load_config, resolve
from luthier.hf.vision.tiny_vision import seeing_processor, seeing_types

SOME = ["llama", "qwen3", "gemma2", "cohere2", "granite", "gpt2", "phi", "mixtral", "mistral", "opt", "falcon", "mamba"]


def test_every_type_that_is_trained_can_be_shrunk() -> None:
    refused = []
    for kind in causal_types():
        if never_causal(kind):  # the defaults of one of these contradict themselves
            refused.append(kind)
            continue
        config = debug_config(kind)
        refused += [kind] if not_causal(config) else []
        text = config.get_text_config(decoder=True)
        assert kind in seeing_types() or getattr(text, "vocab_size", VOCABULARY) == VOCABULARY, kind
    assert len(debug_tokenizer()) == VOCABULARY
    assert len(refused) == 42
    assert {"bart", "bert", "trocr", "whisper", "xlnet"} <= set(refused)
    assert not {"gpt2", "gemma3", "phi4_multimodal", "qwen3_5"} & set(refused)


@pytest.mark.parametrize("kind", seeing_types())
def test_a_tiny_model_that_sees_knows_the_tokens_of_its_processor(kind: str) -> None:
    config, tokenizer = debug_config(kind), debug_tokenizer(kind)
    processor: Any = seeing_processor(kind, tokenizer)
    assert config.image_token_id in processor.image_token_ids
    assert tokenizer("one two")["input_ids"] == debug_tokenizer()("one two")["input_ids"]
    model = load_model(resolve(f"debug:{kind}"))
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert debug_config(kind, layers=3).get_text_config().num_hidden_layers == 3


def test_what_is_no_causal_model_is_refused_before_it_is_built() -> None:
    with pytest.raises(ModelError, match="bert is an encoder, whose positions see those after them"):
        load_model(resolve("debug:bert"))


def test_a_model_made_small_keeps_its_options() -> None:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=36, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )  # fmt: skip
    small = shrink(config, layers=4)
    assert small.tie_word_embeddings
    assert small.rope_parameters["rope_theta"] == 5e6
    assert (small.num_hidden_layers, len(small.layer_types), small.num_key_value_heads) == (4, 4, 2)
    assert small.num_attention_heads * small.head_dim > small.hidden_size
    assert shrink(PhiConfig(num_attention_heads=32, num_key_value_heads=32)).num_key_value_heads == 4
    assert config.hidden_size == 2560


@pytest.mark.parametrize("kind", SOME)
def test_a_debug_model_is_small_and_the_same_for_a_seed(kind: str) -> None:
    first, second = (load_model(resolve(f"debug:{kind}"), seed=7) for _ in range(2))
    other = load_model(resolve(f"debug:{kind}"), seed=8)
    assert sum(p.numel() for p in first.parameters()) < 1_000_000
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_heads_that_share_nothing_are_as_few_as_there_are() -> None:
    for heads, few in ((2, 2), (32, 4)):
        small = shrink(LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads))
        assert (small.num_attention_heads, small.num_key_value_heads) == (few, few)


def test_layers_of_every_kind_are_kept() -> None:
    assert set(debug_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert load_config(resolve("debug:mistral")).sliding_window == 16


def test_fields_can_be_changed() -> None:
    assert debug_config("granite", logits_scaling=8.0).logits_scaling == 8.0
    with pytest.raises(ModelError, match="no tiny mixtral can be made"):
        debug_config("mixtral", hidden_act=7)
