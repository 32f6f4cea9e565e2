"""Adapters on fused experts against PEFT's target_parameters, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from luthier.adapters import adapted_layers, apply_lora, load_peft, merge, save_peft
from luthier.adapters.experts import LoraExperts, adapted, grouped
from luthier.adapters.init import first_down
from luthier.config import LoraConfig
from luthier.errors import ConfigError, ModelError
from luthier.hf.debug.tiny import debug_config
from tests.adapters.models import PEFT_WARNINGS, disturb, relative

pytestmark = list(PEFT_WARNINGS)

KINDS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "nemotron_h"]
TO_FP32 = {"nemotron_h"}
"""Their own code sums in fp32, even of a float64 model."""
SHARED = ["deepseek_v3", "glm4_moe"]
"""They have dense layers and shared experts beside the fused ones."""
ROWS = torch.randint(3, 250, (2, 13), generator=torch.Generator().manual_seed(3))


def tiny(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of this kind with strong weights, the same at every call."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(debug_config(kind), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    return model(ROWS, use_cache=False).logits


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(logits(model)[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = tiny(kind, dtype)
    target = ["experts"] if kind == "nemotron_h" else ["attn", "experts"]  # PEFT adapts no Mamba layer
    apply_lora(model, LoraConfig(rank=4, alpha=6, **{"target": target, **options}))
    disturb(model)
    return model


def reloaded(kind: str, directory: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The same adapter as PEFT reads it."""
    model = peft.PeftModel.from_pretrained(
        tiny(kind, dtype), str(directory), is_trainable=True, autocast_adapter_dtype=False
    )
    return model.eval()


@pytest.mark.parametrize("kind", KINDS + SHARED)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 3e-6)])
def test_outputs_and_gradients_equal_pefts(kind: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    """Those of PEFT in float64, whatever the dtype: of two results in fp32 each is rounded its own way."""
    bound = max(bound, 1e-6) if kind in TO_FP32 else bound
    model = ours(kind, dtype, **({"target": ["attn", "mlp"]} if kind in SHARED else {}))
    theirs = reloaded(kind, save_peft(model, tmp_path))
    with torch.no_grad():
        assert relative(logits(model), logits(theirs)) < bound
    found = gradients(model)
    (tmp_path / "gradients").mkdir()
    for name, gradient in found.items():  # written as adapters are, PEFT's must be equal under its own names
        model.get_parameter(name).data.copy_(gradient)
    again = reloaded(kind, save_peft(model, tmp_path / "gradients"))
    values = dict(again.named_parameters())
    expected = gradients(theirs)
    assert len(expected) == len(found) > 0
    assert {n: e for n, g in expected.items() if (e := relative(values[n].detach(), g)) > bound} == {}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS + SHARED)
def test_an_adapter_before_its_first_step_changes_no_bit(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)  # which cut products differently
    for dtype in (torch.float32, torch.bfloat16) if kind in TO_FP32 else (torch.float64, torch.float32, torch.bfloat16):
        model = tiny(kind, dtype)
        before = logits(model).detach()
        apply_lora(model, LoraConfig(rank=8))
        assert any(isinstance(module, LoraExperts) for module in model.modules())
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", KINDS + SHARED)
def test_merging_gives_the_same_model(kind: str) -> None:
    model = ours(kind, target=["attn", "mlp"])
    with torch.no_grad():
        expected = logits(model)
        report = merge(model)
        assert relative(logits(model), expected) < (1e-6 if kind in TO_FP32 else 1e-12)
    assert report.deviation < 1e-15
    assert type(model) is type(tiny(kind))
    assert {type(m) for m in model.modules()} == {type(m) for m in tiny(kind).modules()}
    assert model.state_dict().keys() == tiny(kind).state_dict().keys()


@pytest.mark.parametrize("kind", KINDS + SHARED)
def test_files_are_read_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = ours(kind, target=["attn", "mlp"], dropout=0.1)
    save_peft(model, tmp_path)
    again = tiny(kind)
    load_peft(again, tmp_path)
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.0  # PEFT refuses another where it adapts parameters
    assert torch.equal(logits(model.eval()), logits(again.eval()))


def test_one_matrix_alone_and_files_of_peft(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    theirs = peft.get_peft_model(tiny("mixtral"), config, autocast_adapter_dtype=False)
    disturb(theirs)
    theirs.save_pretrained(tmp_path)
    model = tiny("mixtral")
    load_peft(model, tmp_path)
    with torch.no_grad():
        assert relative(logits(model), logits(theirs.eval())) < 1e-12
    named = tiny("mixtral")
    apply_lora(named, LoraConfig(rank=3, alpha=5, target=["q_proj", "experts.down_proj"]))
    assert [name for name, _ in adapted(named)] == [name for name, _ in adapted(model)]
    assert all("down_proj" in name or "q_proj" in name for name, _ in adapted(model))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_peft(ours("mixtral", target="experts"), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    small = AutoModelForCausalLM.from_config(debug_config("mixtral", num_local_experts=3), dtype=torch.float64)
    with pytest.raises(ModelError, match="nothing for 3 experts"):
        load_peft(small, tmp_path)
    wide = AutoModelForCausalLM.from_config(debug_config("mixtral", intermediate_size=96), dtype=torch.float64)
    with pytest.raises(ModelError, match=r"the adapter of model\.layers\.0\.mlp\.experts\.lora\.gate_up_proj is"):
        load_peft(wide, tmp_path)
    del tensors["base_model.model.model.layers.0.mlp.experts.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"experts.down_proj is adapted, but no key"):
        load_peft(tiny("mixtral"), tmp_path)


def test_experts_that_compute_in_a_way_of_their_own_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = tiny("longcat_flash")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj"]))
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(ModelError, match="LongcatFlashExperts computes in a way of its own"):
        load_peft(tiny("longcat_flash"), tmp_path)


def test_targets() -> None:
    default = ours("glm4_moe", target=["attn", "mlp"])
    names = [name for name, _ in adapted(default)]
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert "model.layers.1.mlp.shared_experts.up_proj" in names
    assert "model.layers.0.mlp.down_proj" in names
    assert not any("mlp.gate." in name or name.endswith("mlp.gate") for name in names)
    linear = ours("glm4_moe", target="all-linear")
    assert len(list(adapted(linear))) == len(list(adapted_layers(linear)))
    with pytest.raises(ConfigError, match="'experts' adapts nothing in LlamaForCausalLM"):
        ours("llama", target="experts")
    within = ours("mixtral", target=["q_proj", r".*layers\.0\.mlp\.experts\.down_proj"])
    assert len([name for name, _ in adapted(within) if "experts" in name]) == 1


def test_first_values_are_drawn_by_name() -> None:
    model = tiny("mixtral", torch.float32)
    apply_lora(model, LoraConfig(rank=4, target="experts"), 5)
    for name, layer in adapted(model):
        stack = first_down(4, layer.lora_shape.inputs, name, 5, 4)
        assert torch.equal(layer.lora_A.weight, stack)
        assert stack.shape == (4, 4, layer.lora_shape.inputs)
        assert not layer.lora_B.weight.any()
    assert not torch.equal(stack[0], stack[1])


def test_dropout_is_drawn_while_training_alone() -> None:
    model = ours("mixtral", dropout=0.5)
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_grouped_products_with_empty_groups() -> None:
    for dtype, inputs, outputs in ((torch.float64, 3, 5), (torch.float32, 8, 4), (torch.float32, 3, 5)):
        x = torch.randn(7, inputs, dtype=dtype, requires_grad=True)
        weights = torch.randn(4, inputs, outputs, dtype=dtype, requires_grad=True)
        sizes = torch.tensor([3, 0, 4, 0])
        y = grouped(x, weights, sizes)
        expected = torch.cat([x[:3] @ weights[0], x[3:] @ weights[2]])
        assert relative(y, expected) < 1e-5
        y.square().sum().backward()
        assert weights.grad is not None
        assert not weights.grad[1].any()
        assert grouped(x[:0], weights, sizes * 0).shape == (0, outputs)
