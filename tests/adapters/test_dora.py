"""DoRA against PEFT's: outputs, gradients, files both ways, merging; what has no lengths is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from luthier.adapters import adapted_layers, apply_lora, load_peft, merge, save_peft
from luthier.config import LoraConfig
from luthier.errors import ConfigError, ModelError
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, loss, relative, tiny
from tests.adapters.test_gradients import TARGETS, gradients, plain

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")]


def lengthen(model: Any) -> None:
    """Give every adapter random values: matrices, and lengths that are no norms any more."""
    disturb(model)
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def pair(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """One model adapted here and its twin adapted by PEFT, with the same values."""
    dropout = options.pop("dropout", 0.0)
    ours = tiny(kind, dtype)
    apply_lora(ours, LoraConfig(rank=4, alpha=6, target=TARGETS[kind], dora=True, dropout=dropout, **options))
    lengthen(ours)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=TARGETS[kind],
        use_dora=True,
        use_rslora=options.get("rslora", False),
        lora_dropout=dropout,
        fan_in_fan_out=kind == "gpt2",
    )
    theirs = peft.get_peft_model(tiny(kind, dtype), config, autocast_adapter_dtype=False)
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[plain(name)])
    return ours, theirs.eval()


def compare(ours: Any, theirs: Any, bound: float) -> None:
    left, right = gradients(ours), gradients(theirs)
    assert set(left) == set(right)
    assert any("magnitude" in name for name in left)
    assert {name: worst for name in left if (worst := relative(left[name], right[name])) > bound} == {}


@pytest.mark.parametrize("kind", list(TARGETS))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_gradients_equal_pefts(kind: str, dtype: torch.dtype, bound: float) -> None:
    ours, theirs = pair(kind, dtype)
    assert relative(logits(ours), logits(theirs)) < bound
    compare(ours, theirs, bound)


def test_rslora_equals_pefts() -> None:
    compare(*pair("llama", rslora=True), 1e-10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_base_weights_may_train_too(kind: str) -> None:
    ours, theirs = pair(kind)
    ours.requires_grad_(True)
    theirs.requires_grad_(True)
    compare(ours, theirs, 1e-10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_dropout_drops_what_peft_drops(kind: str) -> None:
    ours, theirs = pair(kind, dropout=0.3)
    ours.train(), theirs.train()
    for model in (ours, theirs):
        for module in model.modules():
            if type(module) is torch.nn.Dropout and module.p != 0.3:
                module.p = 0.0
    found = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        found.append(gradients(model))
    assert {name for name in found[0] if relative(found[0][name], found[1][name]) > 1e-10} == set()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_recomputed() -> None:
    ours, theirs = pair("llama")
    ours.train()
    ours.activation_checkpointing_enable({"use_reentrant": False})
    compare(ours, theirs, 1e-10)
    ours, theirs = pair("llama")
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    compare(ours, theirs, 1e-10)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_equal_to_the_base_before_the_first_step(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind, dtype)
    before = logits(model)
    plain_loss = loss(model).detach()
    said = apply_lora(model, LoraConfig(target=["attn", "unembed"], dora=True))
    assert str(said).startswith("DoRA: ")
    assert torch.equal(logits(model), before)
    assert torch.equal(loss(model), plain_loss)


def test_lengths_stay_float32_beside_bf16_and_move() -> None:
    model = tiny("llama", torch.bfloat16)
    apply_lora(model, LoraConfig(target=["attn"], dora=True))
    layer = model.model.layers[0].self_attn.q_proj
    lengths = layer.lora_magnitude_vector.weight
    assert lengths.dtype == torch.float32
    assert lengths.requires_grad
    assert torch.equal(lengths, torch.linalg.vector_norm(layer.weight.float(), dim=1).square().sqrt())
    before = lengths.detach().clone()
    loss(model).backward()
    torch.optim.Adam([lengths], lr=1e-4).step()
    assert (lengths != before).all()
    assert torch.equal((before.bfloat16() - 1e-4), before.bfloat16())  # where bfloat16 would have stood still


def test_a_row_of_zeros_has_no_direction_and_stays_finite() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0] = 0
    before = logits(model)
    apply_lora(model, LoraConfig(target=["q_proj"], dora=True))
    assert torch.equal(logits(model), before)
    loss(model).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    ours = tiny(kind)
    target = ["attn", "mlp", *(["unembed"] if kind == "llama-tied" else [])]
    apply_lora(ours, LoraConfig(rank=4, target=target, dora=True))
    lengthen(ours)
    save_peft(ours, tmp_path / "ours", base_model="the/base")
    assert json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["use_dora"] is True
    theirs = peft.PeftModel.from_pretrained(tiny(kind), tmp_path / "ours", autocast_adapter_dtype=False)
    assert relative(logits(theirs), logits(ours)) < 1e-12
    written = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    again = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert set(written) == set(again)
    assert all(torch.equal(written[key], again[key]) for key in written)
    lengthen(theirs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.25)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    model = tiny(kind)
    load_peft(model, tmp_path / "theirs")
    assert relative(logits(model), logits(theirs)) < 1e-12
    assert not torch.equal(logits(model), logits(ours))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in ours.named_parameters() if p.requires_grad
    }


def test_lengths_that_are_missing_are_named(tmp_path: Path) -> None:
    ours = tiny("llama")
    apply_lora(ours, LoraConfig(rank=4, target=["q_proj"], dora=True))
    save_peft(ours, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "magnitude" not in key}, file)
    with pytest.raises(ModelError, match=r"of model.layers.0.self_attn.q_proj lora_magnitude_vector is missing"):
        load_peft(tiny("llama"), tmp_path)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
def test_merged_equals_adapted(kind: str, tmp_path: Path) -> None:
    ours, theirs = pair(kind) if kind in TARGETS else (tiny(kind), None)
    if theirs is None:
        apply_lora(ours, LoraConfig(rank=4, target=["attn", "unembed"], dora=True))
        lengthen(ours)
    expected = logits(ours)
    said = merge(ours)
    assert relative(logits(ours), expected) < 1e-12
    assert said.untied is (kind == "llama-tied")
    assert not list(adapted_layers(ours))
    ours.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)), logits(ours))
    if theirs is not None:
        merged = theirs.merge_and_unload()
        for name, value in merged.state_dict().items():
            assert relative(ours.state_dict()[name], value) < 1e-12, name


def test_experts_have_no_lengths() -> None:
    with pytest.raises(ConfigError, match=r"adapter.dora: DoRA has no lengths for matrices of fused experts"):
        apply_lora(tiny("mixtral"), LoraConfig(target=["attn", "mlp"], dora=True))
