"""Counted operations against those that torch sees happen."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from luthier.adapters import apply_lora
from luthier.config.sections import LoraConfig
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.report.flops import count_flops
from luthier.report.operations import AttentionFlops, ModelFlops

LENGTH = 12


def happened(model: torch.nn.Module) -> tuple[int, int]:
    """Operations of plain Transformers' forward and backward over one document, the head on every position."""
    ids = torch.randint(3, 50, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as ahead:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as back:
        loss.backward()
    return ahead.get_total_flops(), back.get_total_flops()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gemma2", "phi"])
def test_full_fine_tuning_is_what_torch_counts(model_type: str) -> None:
    model = load_model(resolve(f"debug:{model_type}"), dtype="fp64", attention="eager")
    check(count_flops(model), *happened(model.train()))


def test_adapters_of_experts_are_what_happens() -> None:
    model = load_model(resolve("debug:mixtral"), dtype="fp64", attention="eager")
    apply_lora(model, LoraConfig(rank=4, target=["experts"]))
    check(count_flops(model), *happened(model.train()), within=5e-3)  # routers, whose kind is no linear layer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model_type", "ours", "theirs"),
    [
        ("llama", {"target": ["attn", "mlp"]}, {"target_modules": "all-linear"}),
        ("qwen3", {"target": ["attn"]}, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        ("qwen3", {"target": ["mlp"]}, {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
        ("qwen3", {"target": ["o_proj"]}, {"target_modules": ["o_proj"]}),
        (
            "llama",
            {"target": ["attn"], "train_modules": ["lm_head"]},
            {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "modules_to_save": ["lm_head"]},
        ),
        ("gpt2", {"target": ["attn", "mlp"]}, {"target_modules": "all-linear", "fan_in_fan_out": True}),
    ],
)
def test_adapters_are_what_torch_counts_of_peft(model_type: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    source = resolve(f"debug:{model_type}")
    adapted = load_model(source, dtype="fp64", attention="eager")
    apply_lora(adapted, LoraConfig(rank=4, **ours))
    plain = load_model(source, dtype="fp64", attention="eager")
    check(count_flops(adapted), *happened(peft.get_peft_model(plain, peft.LoraConfig(r=4, **theirs)).train()))


def check(flops: ModelFlops, forward: int, backward: int, within: float = 2e-3) -> None:
    # torch multiplies whole squares of queries and keys; ours are those that a query may see.
    unseen = [layer.pair * LENGTH**2 - layer.forward(LENGTH) for layer in flops.attention]
    unseen_back = [2 * count for count, layer in zip(unseen, flops.attention, strict=True) if layer.backward]
    # The tolerance is for the products of positions and frequencies in rotary embeddings.
    assert flops.forward([LENGTH], LENGTH) + sum(unseen) == pytest.approx(forward, rel=within)
    assert flops.backward([LENGTH], LENGTH) + sum(unseen_back) == pytest.approx(backward, rel=within)


def test_attention_sees_what_comes_before_within_the_window() -> None:
    for window in (None, 3, 100):
        seen = sum(min(query + 1, window or 100) for query in range(7))
        assert AttentionFlops(10, window, True).forward(7) == 10 * seen


def test_documents_are_counted_apart_and_untrained_positions_not_in_the_head() -> None:
    flops = count_flops(load_model(resolve("debug:llama")))
    together, apart = flops.forward([10, 10], 20), flops.forward([20], 20)
    assert apart - together == sum(layer.pair * 100 for layer in flops.attention)
    assert flops.step([20], 20) - flops.step([20], 5) == 15 * (flops.head_forward + flops.head_backward)


def test_only_visited_experts_count() -> None:
    model = load_model(resolve("debug:mixtral"))
    flops = count_flops(model)
    config = model.config
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name and "experts" not in name)
    active = experts * config.num_experts_per_tok // config.num_local_experts
    router = flops.token_forward - 2 * (active + dense)
    assert 0 <= router <= 2 * config.num_local_experts * config.hidden_size * config.num_hidden_layers
