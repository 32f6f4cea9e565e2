"""What is adapted, what trains, first values, ties; built on meta too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from luthier.adapters import (
    adapted_layers,
    apply_lora,
    finish_lora,
    first_down,
    freeze,
    is_adapter_weight,
    resolve_modules,
    resolve_targets,
)
from luthier.config import LoraConfig
from luthier.errors import ConfigError
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from tests.adapters.models import logits, loss, tiny


def trainable(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_line_of_qwen3_0_6b() -> None:
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    said = str(apply_lora(model, LoraConfig(rank=16, target=["attn", "mlp"])))
    assert said == "LoRA: 196 adapters (rank=16, targets=attn,mlp); 10,092,544 trainable of 606,142,464"


@pytest.mark.parametrize(
    ("kind", "items", "endings"),
    [
        ("llama", ["attn"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("llama", ["mlp"], {"gate_proj", "up_proj", "down_proj"}),
        ("llama-tied", ["unembed"], {"lm_head"}),
        ("llama", ["all-linear"], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("llama", ["self_attn.v_proj", "down_proj"], {"v_proj", "down_proj"}),
        ("gpt2", ["attn", "mlp"], {"c_attn", "c_proj", "c_fc"}),
        ("mixtral", ["all-linear"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_targets(kind: str, items: list[str], endings: set[str]) -> None:
    model = tiny(kind, torch.float32)
    found = resolve_targets(model, items)
    assert {name.rpartition(".")[2] for name in found} == endings
    order = [name for name, _ in model.named_modules()]
    assert found == sorted(found, key=order.index)


def test_targets_by_pattern_and_by_full_name() -> None:
    model = tiny("llama")
    assert resolve_targets(model, [r"model\.layers\.1\..*_proj"]) == resolve_targets(
        model, [f"layers.1.{part}" for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
         "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    )  # fmt: skip
    assert resolve_targets(model, ["model.layers.0.mlp.up_proj"]) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("kind", "items", "said"),
    [
        ("llama", ["attn", "experts"], "'experts' adapts nothing in LlamaForCausalLM; choose from attn, mlp, unembed"),
        ("llama", ["q_prok"], "'q_prok' adapts nothing in LlamaForCausalLM; did you mean 'q_proj'?"),
        ("llama", ["attention"], "'attention' adapts nothing"),
        ("llama", ["norm"], "model.norm is a LlamaRMSNorm, not a linear layer or the table"),
        ("llama", ["q_proj", "(unclosed"], "'(unclosed' adapts nothing"),
        ("llama", ["proj"], "'proj' adapts nothing"),
        ("gpt2", ["q_proj"], "'q_proj' adapts nothing in GPT2LMHeadModel"),
    ],
)
def test_what_adapts_nothing_is_refused(kind: str, items: list[str], said: str) -> None:
    model = tiny(kind, torch.float32)
    with pytest.raises(ConfigError) as caught:
        apply_lora(model, LoraConfig(target=items))
    assert said in str(caught.value)
    assert str(caught.value).startswith("adapter.target: ")
    assert not list(adapted_layers(model))


def test_modules_trained_whole() -> None:
    model = tiny("llama")
    said = apply_lora(model, LoraConfig(target=["attn"], train_modules=["norm", "lm_head"]))
    assert said.trained == ("model.norm", "lm_head")
    assert trainable(model) == {name for name, _ in model.named_parameters() if is_adapter_weight(name)} | {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert said.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "trained whole=model.norm,lm_head" in str(said)
    model.requires_grad_(True)
    freeze(model)
    assert "model.embed_tokens.weight" not in trainable(model)
    assert resolve_modules(model, [r"model\.layers\.\d+\.mlp", "mlp.up_proj"]) == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]
    with pytest.raises(ConfigError, match=r"^adapter.train_modules: 'nrom' names no module .* did you mean 'norm'\?"):
        resolve_modules(model, ["nrom"])


def test_nothing_is_adapted_inside_what_is_trained_whole() -> None:
    model = tiny("llama")
    apply_lora(model, LoraConfig(target=["attn"], train_modules=["layers.0"]))
    assert {name.split(".")[2] for name, _ in adapted_layers(model)} == {"1"}
    with pytest.raises(ConfigError, match="since what it names is trained whole"):
        apply_lora(tiny("llama"), LoraConfig(target=["unembed"], train_modules=["lm_head"]))


@pytest.mark.parametrize(
    ("named", "tied"), [(["embed_tokens", "lm_head"], True), (["lm_head"], False), (["embed_tokens"], False)]
)
def test_training_one_end_of_a_tie_unties(named: list[str], tied: bool) -> None:
    model = tiny("llama-tied")
    before = logits(model)
    said = apply_lora(model, LoraConfig(target=["attn"], train_modules=named))
    assert torch.equal(logits(model), before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.tie_word_embeddings is tied
    assert model.lm_head.weight.requires_grad is ("lm_head" in named)
    assert model.model.embed_tokens.weight.requires_grad is ("embed_tokens" in named)
    assert said.total == sum(p.numel() for p in model.parameters())
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_adapting_a_tied_head_never_touches_the_embedding() -> None:
    model = tiny("llama-tied")
    embedding = model.model.embed_tokens.weight.detach().clone()
    apply_lora(model, LoraConfig(target=["unembed"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = logits(model)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    assert not torch.equal(logits(model), before)
    assert torch.equal(model.model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [None, "fp32"])
def test_bit_equal_to_the_base_before_the_first_step(kind: str, dtype: torch.dtype, adapter: Any) -> None:
    model = tiny(kind, dtype)
    before = logits(model)
    plain_loss = loss(model).detach()
    apply_lora(model, LoraConfig(target=["attn", "unembed"], dtype=adapter))
    assert torch.equal(logits(model), before)
    for _ in range(3):
        recorded = loss(model)
        recorded.backward()
        assert torch.equal(recorded, plain_loss)


def test_first_values_depend_on_seed_and_name_alone() -> None:
    one, other = tiny("llama", torch.float32), tiny("llama", torch.bfloat16)
    apply_lora(one, LoraConfig(rank=4, target=["attn"]), seed=5)
    torch.manual_seed(99)
    apply_lora(other, LoraConfig(rank=4, target=["q_proj", "mlp"]), seed=5)
    name = "model.layers.1.self_attn.q_proj"
    drawn = one.get_submodule(name).lora_A.weight
    assert torch.equal(drawn, first_down(4, 24, name, seed=5))
    assert torch.equal(drawn.bfloat16(), other.get_submodule(name).lora_A.weight)
    assert not torch.equal(drawn, one.get_submodule(name.replace("1", "0")).lora_A.weight)
    assert not torch.equal(drawn, first_down(4, 24, name, seed=6))
    assert all(not layer.lora_B.weight.any() for _, layer in adapted_layers(one))


def test_first_values_are_spread_as_pefts() -> None:
    ours = first_down(256, 512, "a.name", seed=0)
    theirs = nn.init.kaiming_uniform_(torch.empty(256, 512), a=5**0.5)
    assert abs(ours.std() / theirs.std() - 1) < 0.01
    assert ours.abs().max() <= 512**-0.5
    assert abs(ours.mean()) < 1e-3


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_built_on_meta_and_loaded(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny(kind, dtype)
    base.save_pretrained(tmp_path)
    config = LoraConfig(rank=4, target=["attn", "unembed"], train_modules=[r".*\.1\.(ln_2|post_attention_layernorm)"])
    on_meta: list[str] = []
    model = load_model(
        resolve(str(tmp_path)),
        dtype=dtype,
        prepare=lambda model: on_meta.append(str(apply_lora(model, config, seed=3))),
    )
    said = finish_lora(model, config, seed=3)
    assert on_meta == [str(said)]
    built = tiny(kind, dtype)
    assert str(apply_lora(built, config, seed=3)) == str(said)
    assert trainable(model) == trainable(built)
    values = dict(built.named_parameters())
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())
    plain = load_model(resolve(str(tmp_path)), dtype=dtype)
    assert torch.equal(logits(model), logits(plain))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), base.parameters(), strict=True))


def test_a_layer_that_its_model_never_calls_is_refused() -> None:
    model = load_model(resolve("debug:mamba"))
    said = r"MambaMixer reads the weight of backbone\.layers\.0\.mixer\.dt_proj without calling the layer"
    with pytest.raises(ConfigError, match=said):
        apply_lora(model, LoraConfig(target=["attn"]))
    model = load_model(resolve("debug:mamba"))
    assert apply_lora(model, LoraConfig(target=["in_proj", "x_proj", "out_proj"])).adapters == 6


def test_applying_draws_nothing_from_the_random_streams() -> None:
    model = tiny("llama", torch.float32)
    model.config.attention_dropout = 0.5
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    apply_lora(model, LoraConfig(dropout=0.1))
    assert torch.equal(torch.rand(3), expected)
    assert not model.training
