"""Moments in eight bits are those of bitsandbytes, take a quarter of the memory, and come back from a checkpoint."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from luthier.config.sections import OptimizerConfig
from luthier.optim.build import build_optimizer
from luthier.optim.eight_bits import BLOCK
from luthier.optim.optimizer import Optimizer

RATE, DECAY = 1e-2, 0.1
SHAPES = {"layers.0.up.weight": (96, 64), "layers.0.odd.weight": (67, 77), "layers.0.small.weight": (16, 16)}
"""One of whole blocks, one whose last block is not whole, one that is too small for them."""


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in SHAPES.items()}


def optimizer_of(parameters: dict[str, nn.Parameter], **fields: Any) -> Optimizer:
    given = {"name": "adamw", "learning_rate": RATE, "weight_decay": DECAY, "state_dtype": "int8", **fields}
    config: OptimizerConfig = TypeAdapter(OptimizerConfig).validate_python(given)
    return build_optimizer(parameters.items(), config)


def train(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(100 + step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()


def test_the_same_as_bitsandbytes() -> None:
    ours, theirs = weights(), weights()
    train(optimizer_of(ours), ours, range(5))
    oracle = bitsandbytes.optim.AdamW8bit(list(theirs.values()), lr=RATE, weight_decay=DECAY)
    train(oracle, theirs, range(5))
    for name in SHAPES:
        moved = (theirs[name] - weights()[name]).abs().max()
        assert (ours[name] - theirs[name]).abs().max() < 1e-4 * moved, name


def test_large_tensors_in_pieces_are_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from luthier.optim import optimizer as implementation

    whole, cut = weights(), weights()
    train(optimizer_of(whole), whole, range(3))
    monkeypatch.setattr(implementation, "_CPU_PIECE", 4 * BLOCK)
    train(optimizer_of(cut), cut, range(3))
    assert all(torch.equal(whole[name], cut[name]) for name in SHAPES)


@pytest.mark.parametrize("fields", [{}, {"name": "stochastic_adamw"}], ids=["adamw", "stochastic_adamw"])
def test_memory_and_resuming(fields: dict[str, Any]) -> None:
    parameters = weights(torch.bfloat16)
    optimizer = optimizer_of(parameters, **fields)
    train(optimizer, parameters, range(2))
    states = optimizer.state[parameters["layers.0.up.weight"]]
    taken = sum(states[name].nbytes for name in states if name.startswith("exp_avg"))
    assert taken == 96 * 64 * 2 + 2 * 4 * 96 * 64 // BLOCK
    assert optimizer.state[parameters["layers.0.small.weight"]]["exp_avg"].dtype == torch.float32
    again = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = optimizer_of(again, **fields)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(2, 4))
    train(other, again, range(2, 4))
    assert all(torch.equal(parameters[name], again[name]) for name in SHAPES)
