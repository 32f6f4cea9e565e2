"""Estimates against models that are really there, and the Qwen3-0.6B shape from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.config import RunConfig
from luthier.engine.build import build_state
from luthier.estimate import estimate, lines
from luthier.hf.source import resolve

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def qwen3(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    return str(tmp_path)


def run(model: str, **fields: Any) -> dict[str, Any]:
    train = {"precision": "bf16", "device": "cpu", **fields.pop("train", {})}
    return estimate(
        RunConfig.model_validate({"model": model, "data": {"sequence_length": 64}, "train": train, **fields})
    )


def test_the_qwen3_shape_from_its_config_alone(qwen3: str) -> None:
    result = run(qwen3, adapter={"kind": "lora", "rank": 16})
    assert result["adapter"] == ("LoRA: 196 adapters (rank=16, targets=attn,mlp); 10,092,544 trainable of 606,142,464")
    assert result["parameters"] == {"total": 606_142_464, "trainable": 10_092_544}
    memory = result["memory"]
    assert 0 <= memory["weights"] - 2 * 606_142_464 < 4096  # bf16, and rope's frequencies
    assert memory["gradients"] == 4 * 10_092_544
    assert memory["optimizer"] == 8 * 10_092_544  # two fp32 moments
    assert memory["total"] == sum(count for name, count in memory.items() if name != "total")


def test_full_fine_tuning_keeps_exact_weights_and_twice_the_backward(qwen3: str) -> None:
    result = run(qwen3, train={"rows_per_step": 4, "steps": 10})
    total = 606_142_464 - 10_092_544
    assert result["parameters"] == {"total": total, "trainable": total}
    assert result["memory"]["optimizer"] == 10 * total  # moments and the low bits of bf16 weights
    flops = result["flops"]
    # Every matrix once, the tied embedding as the head; attention over 64 tokens sees 32.5 on average.
    linear = 2 * (total - 28 * (2 * 1024 + 2 * 128) - 1024)
    assert flops["token_forward"] == pytest.approx(linear + 28 * 4 * 16 * 128 * 32.5, rel=1e-9)
    assert flops["token_backward"] == 2 * flops["token_forward"]
    assert flops["step"] == flops["token"] * 4 * 64
    assert flops["run"] == flops["step"] * 10


@pytest.mark.parametrize("optimizer", ["adamw", "stochastic_adamw", "adafactor", "muon"])
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "target": ["attn", "unembed"]}])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_bytes_are_those_of_the_real_thing(model_type: str, adapter: dict[str, Any] | None, optimizer: str) -> None:
    config = RunConfig.model_validate(
        {"model": f"debug:{model_type}", "data": {}, "adapter": adapter, "optimizer": {"name": optimizer}}
    )
    state = build_state(
        resolve(config.model), adapter=config.adapter, optimizer=config.optimizer, precision="bf16", device=None
    )
    result = run(config.model, adapter=adapter, optimizer={"name": optimizer})
    parameters = list(state.model.parameters())
    assert result["parameters"]["total"] == sum(p.numel() for p in parameters)
    assert result["parameters"]["trainable"] == sum(p.numel() for p in state.trainable.values())
    moments = [t for values in state.optimizer.state.values() for t in values.values() if hasattr(t, "numel")]
    assert result["memory"]["optimizer"] == sum(t.numel() * t.element_size() for t in moments)
    tensors = [*parameters, *state.model.buffers()]
    # Loading casts single numbers that lie in buffers (gemma2's embedding scale).
    assert result["memory"]["weights"] == pytest.approx(sum(t.numel() * t.element_size() for t in tensors), abs=8)


def test_recomputation_keeps_less(qwen3: str) -> None:
    kept = [
        run(qwen3, train={"activation_checkpointing": policy})["memory"]["activations"]
        for policy in ("off", "selective", "full")
    ]
    assert kept[0] > 1.5 * kept[1] > 3 * kept[2]


def test_for_people(qwen3: str) -> None:
    text = "\n".join(lines(run(qwen3, train={"steps": 3})))
    assert "596,049,920 parameters, 596,049,920 trainable (100.00%), bf16" in text
    assert "memory, total" in text
