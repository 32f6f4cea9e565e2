"""Merging: one rounding, the base's names and classes, ties parted only where they must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from luthier.adapters import LoraSpec, Merging, adapted_layers, apply_lora, attach, merge, merged_weight
from luthier.config import LoraConfig
from luthier.hf.save import save_model
from tests.adapters.models import disturb, logits, relative, tiny


def adapted(kind: str, dtype: torch.dtype, target: list[str]) -> Any:
    model = tiny(kind, dtype)
    apply_lora(model, LoraConfig(rank=4, target=target))
    disturb(model)
    return model


@pytest.mark.parametrize(
    ("kind", "target"),
    [("llama", ["attn", "mlp"]), ("llama-tied", ["attn", "unembed"]), ("llama", ["unembed"]), ("gpt2", ["attn", "mlp"]),
     ("mixtral", ["attn"])],
)  # fmt: skip
def test_merged_equals_adapted_and_is_the_base_in_form(kind: str, target: list[str], tmp_path: Path) -> None:
    model = adapted(kind, torch.float64, target)
    base = tiny(kind)
    expected = logits(model)
    said = merge(model)
    assert relative(logits(model), expected) < 1e-12
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in base.named_modules()]
    assert not list(adapted_layers(model))
    assert said.deviation == 0.0  # float64 adds in float64
    assert said.untied is (kind == "llama-tied")
    assert torch.equal(model.get_input_embeddings().weight, base.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    if kind == "mixtral":
        again.set_experts_implementation("eager")
    assert torch.equal(logits(again), logits(model))
    assert merge(model).layers == 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rounding(dtype: torch.dtype, transposed: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    base = Conv1D(5000, 24) if transposed else nn.Linear(24, 5000)
    layer = attach(base.to(dtype), LoraSpec(3, 5.0))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    update = layer.lora_B.weight.double() @ layer.lora_A.weight.double() * (5.0 / 3)
    exact = layer.weight.double() + (update.t() if transposed else update)
    merged, deviation = merged_weight(layer)
    assert merged.dtype == dtype
    assert merged.shape == layer.weight.shape
    truth = ((merged.double() - exact).abs().max() / exact.abs().max()).item()
    assert deviation == pytest.approx(truth, rel=1e-3)
    if dtype == torch.bfloat16:
        # Halfway cases aside, where float32's own rounding decides, this is exact arithmetic rounded once.
        assert (merged != exact.to(dtype)).double().mean() < 1e-3
        twice = layer.weight + (update.t() if transposed else update).to(dtype)
        assert (merged.double() - exact).abs().mean() < (twice.double() - exact).abs().mean()
    else:
        assert 0 < deviation < 2e-7


def test_the_report_names_the_worst_layer() -> None:
    model = adapted("llama", torch.bfloat16, ["q_proj", "up_proj"])
    deviations = {name: merged_weight(layer)[1] for name, layer in adapted_layers(model)}
    said = merge(model)
    assert said.layers == 4
    assert said.deviation == max(deviations.values())
    assert deviations[said.where] == said.deviation
    assert str(said).startswith("merged 4 adapters, largest deviation by rounding 0.00")


@pytest.mark.parametrize(
    ("kind", "target", "untied"),
    [("llama-tied", ["attn"], False), ("llama-tied", ["attn", "unembed"], True), ("llama", ["unembed"], False),
     ("gpt2", ["mlp"], False), ("mixtral", ["attn"], False)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_while_training_is_the_merged_model(
    kind: str, target: list[str], untied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = adapted(kind, dtype, target)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merging = Merging(model)
    save_model(model, tmp_path / "export", tokenizer=None, transform=merging)
    assert merging.report().untied is untied
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert list(adapted_layers(model))
    assert model.config.tie_word_embeddings is (kind in ("llama-tied", "gpt2"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert again.dtype == dtype
    assert again.config.tie_word_embeddings is (model.config.tie_word_embeddings and not untied)
    said = merge(model)
    assert merging.report() == said
    assert torch.equal(logits(again), logits(model))


def test_an_export_of_a_head_trained_apart_holds_both(tmp_path: Path) -> None:
    model = tiny("llama-tied", torch.float32)
    apply_lora(model, LoraConfig(target=["attn"], train_modules=["lm_head"]))
    disturb(model)
    with torch.no_grad():
        model.lm_head.weight.add_(0.25)
    save_model(model, tmp_path / "export", tokenizer=None, transform=Merging(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    merge(model)
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


def test_a_model_without_adapters_is_left_as_it_is() -> None:
    model = tiny("llama")
    merging = Merging(model)
    assert merging.sources("lm_head.weight") == ("lm_head.weight",)
    assert str(merging.report()) == "no adapters to merge"
