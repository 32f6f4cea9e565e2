"""Oracle: what each architecture itself does with the outputs of a fused projection, and plain weights W + s B A."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.fused import fused_projections
from luthier.tinker import LoraConfig, adapter_state_dict, apply_lora, iter_lora_modules
from tests.adapters.models import disturb, logits, tiny

FUSED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},
    "mpt": {},
    "bloom": {},
    "gpt_bigcode": {"multi_query": True},
    "gpt_bigcode-heads": {"multi_query": False},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "falcon-heads": {"multi_query": False, "new_decoder_architecture": False, "num_kv_heads": 4},
    "falcon-groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = debug_config(kind.partition("-")[0], **FUSED[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * (0.3 if parameter.dim() > 1 else 0.5))
    return model.eval()


def mixed(model: Any, name: str, without: torch.Tensor | None) -> torch.Tensor:
    """What attention hands to its output projection once some outputs of the fused one are 0."""
    parent, _, key = name.rpartition(".")
    module = model.get_submodule(parent)
    output = next(child for child in ("dense", "c_proj", "out_proj") if hasattr(module, child))
    found: list[torch.Tensor] = []

    def blank(layer: Any, arguments: Any, made: torch.Tensor) -> torch.Tensor:
        return made if without is None else torch.where(without, 0.0, made)

    hooks = [
        module.get_submodule(key).register_forward_hook(blank),
        module.get_submodule(output).register_forward_pre_hook(lambda layer, arguments: found.append(arguments[0])),
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found[0]


@pytest.mark.parametrize("kind", list(FUSED))
def test_which_outputs_are_queries_keys_and_values(kind: str) -> None:
    """Without values nothing is mixed; without queries all scores are 0, and the mixture is that without keys."""
    model = made(kind)
    parts = fused_projections(model)
    assert len(parts) == model.config.num_hidden_layers
    name, part = next(iter(parts.items()))
    usual = mixed(model, name, None)
    assert mixed(model, name, part == 2).abs().max() == 0
    without_queries, without_keys = mixed(model, name, part == 0), mixed(model, name, part == 1)
    assert torch.allclose(without_queries, without_keys, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(usual, without_queries, rtol=1e-2)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "falcon-groups"])
def test_each_of_the_three_has_an_adapter_of_its_own(kind: str) -> None:
    plain = made(kind)
    ours = copy.deepcopy(plain)
    apply_lora(ours, LoraConfig(rank=2, train_mlp=False, train_unembed=False))
    disturb(ours)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        for name, layer in iter_lora_modules(ours):
            parts = fused_projections(plain).get(name, torch.zeros(layer.lora_shape.outputs, dtype=torch.int64))
            weight = plain.get_submodule(name).weight
            rows = weight.T if layer.lora_shape.transposed else weight  # [outputs, inputs]
            for part in range(int(parts.max()) + 1):
                here = slice(2 * part, 2 * part + 2)
                down, up = layer.lora_A.weight[here], layer.lora_B.weight[parts == part][:, here]
                rows[parts == part] += 32 / 2 * up @ down
        assert torch.allclose(
            ours(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits, rtol=1e-10
        )
    ours(input_ids=ids, use_cache=False).logits.square().sum().backward()
    for _, layer in iter_lora_modules(ours):
        if layer.lora_B.mask is not None:
            assert (layer.lora_B.weight.grad[layer.lora_B.mask == 0] == 0).all()
            assert (layer.lora_B.weight.grad[layer.lora_B.mask == 1] != 0).all()


def test_gates_choose_by_role_and_one_that_adapts_nothing_is_an_error() -> None:
    model = tiny("llama-tied")
    report = apply_lora(model, LoraConfig(rank=4))
    assert report.adapters == 2 * 7 + 1
    assert {layer.lora_spec.scale for _, layer in iter_lora_modules(model)} == {8.0}
    assert not model.model.embed_tokens.weight.requires_grad  # which is the head's too
    with pytest.raises(ConfigError, match="carries adapters already"):
        apply_lora(model)
    only = tiny("llama")
    apply_lora(only, LoraConfig(rank=4, train_mlp=False, train_unembed=False))
    assert {name.rpartition(".")[2] for name, _ in iter_lora_modules(only)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="lora_config: nothing is to be adapted"):
        apply_lora(tiny("llama"), LoraConfig(train_attn=False, train_mlp=False, train_unembed=False))
    torch.manual_seed(0)
    mamba = AutoModelForCausalLM.from_config(debug_config("mamba"))
    with pytest.raises(ConfigError, match="train_mlp: 'mlp' adapts nothing in MambaForCausalLM"):
        apply_lora(mamba)
    apply_lora(mamba, LoraConfig(rank=4, train_mlp=False))  # dt_proj, whose weight Mamba reads itself, is left out
    assert all("dt_proj" not in name for name, _ in iter_lora_modules(mamba))
    with pytest.raises(ConfigError, match="rank: 0 is no whole number of 1 or more"):
        LoraConfig(rank=0)


def test_a_state_dict_of_adapters_goes_from_one_model_to_another() -> None:
    one, two = tiny("gpt2"), tiny("gpt2")
    apply_lora(one, LoraConfig(rank=2))
    before = logits(one)
    assert torch.equal(before, logits(tiny("gpt2")))  # B is 0 at first
    disturb(one)
    apply_lora(two, LoraConfig(rank=2, seed=3))
    weights = adapter_state_dict(one)
    assert all(".lora_" in name for name in weights)
    missing, unexpected = two.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert not any(".lora_" in name for name in missing)
    assert torch.equal(logits(one), logits(two))
