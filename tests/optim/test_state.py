"""Saving and loading: every bit, every dtype, before the first step too; and how large a checkpoint is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from luthier.config.sections import OptimizerConfig
from luthier.errors import CheckpointError
from luthier.optim.build import build_optimizer
from luthier.optim.optimizer import Optimizer

CONFIGS = {
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "stochastic": {"name": "stochastic_adamw"},
    "stochastic_bf16": {"name": "stochastic_adamw", "state_dtype": "bf16"},
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
}


def make(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 5)).bfloat16()
    config = TypeAdapter(OptimizerConfig).validate_python({"learning_rate": 1e-2, **CONFIGS[name]})
    return model, build_optimizer(model.named_parameters(), config, hidden_matrices=lambda name: name == "0.weight")


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        rows = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        model(rows).float().square().sum().backward()
        optimizer.step()


def assert_equal(first: nn.Module, one: Optimizer, second: nn.Module, other: Optimizer) -> None:
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.state[q][key].dtype, (name, key)
                assert torch.equal(value, other.state[q][key]), (name, key)
            else:
                assert value == other.state[q][key], (name, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_resumed_equals_unbroken_by_bits(name: str, steps: int, flat: bool, tmp_path: Path) -> None:
    """Through torch's distributed checkpoint, as written before the first step and after the third."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = make(name)
    train(model, optimizer, range(steps))
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    train(model, optimizer, range(steps, 6))

    again, fresh = make(name)
    train(again, fresh, range(1))  # something to be overwritten
    target = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, fresh, options=options)}
    dcp.load(target, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    again.load_state_dict(target["model"])
    set_optimizer_state_dict(again, fresh, target["optimizer"], options=options)
    train(again, fresh, range(steps, 6))
    assert_equal(model, optimizer, again, fresh)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_plain_state_dict_keeps_bits_and_dtypes(name: str) -> None:
    model, optimizer = make(name)
    train(model, optimizer, range(2))
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    again, fresh = make(name)
    again.load_state_dict(weights)
    fresh.load_state_dict(states)
    train(again, fresh, range(2, 4))
    assert_equal(model, optimizer, again, fresh)


def test_hyperparameters_are_those_of_the_config_not_of_the_checkpoint() -> None:
    _, optimizer = make("adamw")
    states = copy.deepcopy(optimizer.state_dict())
    for group in states["param_groups"]:
        group["lr"] = group["initial_lr"] = 7.0
    optimizer.load_state_dict(states)
    assert all(group["lr"] == group["initial_lr"] == 1e-2 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("saved", "present"), [("sgd", "adamw"), ("stochastic", "adamw"), ("stochastic_bf16", "stochastic")]
)
def test_states_of_another_optimizer_are_refused(saved: str, present: str) -> None:
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        make(present)[1].load_state_dict(make(saved)[1].state_dict())


def test_size_of_a_checkpoint_of_bf16_adapters() -> None:
    """Rank 16 on the attention of the Qwen3-0.6B shape, weights and adamw's fp32 moments: at most 46 MiB."""
    shapes = {"q": (1024, 2048), "k": (1024, 1024), "v": (1024, 1024), "o": (2048, 1024)}
    adapters = {}
    for layer in range(28):
        for module, (inputs, outputs) in shapes.items():
            name = f"model.layers.{layer}.self_attn.{module}_proj"
            adapters[f"{name}.lora_A.weight"] = nn.Parameter(torch.zeros(16, inputs, dtype=torch.bfloat16))
            adapters[f"{name}.lora_B.weight"] = nn.Parameter(torch.zeros(outputs, 16, dtype=torch.bfloat16))
    assert sum(p.numel() for p in adapters.values()) == 4_587_520
    config = TypeAdapter(OptimizerConfig).validate_python({"name": "adamw"})
    optimizer = build_optimizer(adapters.items(), config, adapters=lambda name: ".lora_" in name)
    tensors = list(adapters.values())
    for states in optimizer.state.values():
        assert states["exp_avg"].dtype == states["exp_avg_sq"].dtype == torch.float32
        tensors.extend(value for value in states.values() if isinstance(value, torch.Tensor))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size == 4_587_520 * 10
    assert size <= 44 * 2**20  # what is left to 46 is for names, counters and random states
