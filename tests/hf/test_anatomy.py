"""Parts and roles found by structure, on architectures that name them differently."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from luthier.hf.anatomy import describe
from luthier.hf.load import build_on_meta, model_class
from luthier.hf.source import load_config, resolve


def anatomy(kind: str):
    source = resolve(f"debug:{kind}")
    config = load_config(source)
    return describe(build_on_meta(model_class(source, config), config))


def last(names: tuple[str, ...]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


QKVO, GATED = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("kind", "attn", "mlp"),
    [
        ("llama", QKVO, GATED),
        ("phi3", {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj"}, {"c_fc", "c_proj"}),
        ("opt", {"q_proj", "k_proj", "v_proj", "out_proj"}, {"fc1", "fc2"}),
        ("falcon", {"query_key_value", "dense"}, {"dense_h_to_4h", "dense_4h_to_h"}),
        ("gpt_neox", {"query_key_value", "dense"}, {"dense_h_to_4h", "dense_4h_to_h"}),
        ("mpt", {"Wqkv", "out_proj"}, {"up_proj", "down_proj"}),
        ("phi", {"q_proj", "k_proj", "v_proj", "dense"}, {"fc1", "fc2"}),
        ("bert", {"query", "key", "value", "dense"}, {"dense"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}, GATED),
    ],
)
def test_roles(kind: str, attn: set[str], mlp: set[str]) -> None:
    found = anatomy(kind)
    assert last(found.attn) == attn
    assert last(found.mlp) == mlp
    assert not set(found.attn) & set(found.mlp)
    assert found.unembed == (found.head,)
    assert found.attention_only


@pytest.mark.parametrize(
    ("kind", "embedding", "norm", "head", "tied"),
    [
        ("llama", "model.embed_tokens", "model.norm", "lm_head", False),
        ("gemma2", "model.embed_tokens", "model.norm", "lm_head", True),
        ("gpt2", "transformer.wte", "transformer.ln_f", "lm_head", True),
        ("opt", "model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head", True),
        ("gpt_neox", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "lm_head", False),
        ("llama4_text", "model.embed_tokens", "model.norm", "lm_head", False),
        ("gemma3", "model.language_model.embed_tokens", "model.language_model.norm", "lm_head", True),
        ("bloom", "transformer.word_embeddings", "transformer.ln_f", "lm_head", True),
    ],
)
def test_parts(kind: str, embedding: str, norm: str, head: str, tied: bool) -> None:
    found = anatomy(kind)
    assert (found.embedding, found.final_norm, found.head, found.tied) == (embedding, norm, head, tied)
    assert len(found.layers) >= 2
    assert not any("vision" in name for name in (*found.layers, *found.attn, *found.mlp))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_experts_are_no_linear_modules_and_routers_no_mlp(kind: str) -> None:
    found = anatomy(kind)
    assert found.experts
    assert found.mlp == ()
    assert last(found.attn) == QKVO


def test_a_shared_expert_is_mlp_and_its_gate_a_router() -> None:
    found = anatomy("qwen2_moe")
    assert last(found.mlp) == GATED
    assert last(found.routers) == {"shared_expert_gate"}


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "jamba", "qwen3_next", "recurrent_gemma", "falcon_mamba", "minimax"])
def test_state_that_runs_along_the_row_is_seen(kind: str) -> None:
    assert not anatomy(kind).attention_only


def test_the_shape_of_qwen3_has_196_linear_layers() -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    model = build_on_meta(Qwen3ForCausalLM, Qwen3Config(**shape))
    found = describe(model)
    assert len(found.all_linear) == 196
    assert sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel() == 596_049_920
