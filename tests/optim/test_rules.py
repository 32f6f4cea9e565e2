"""Every rule against torch's own optimizer, in every dtype, with and without clipping."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from luthier.config.sections import OptimizerConfig
from luthier.errors import UserError
from luthier.optim import optimizer as implementation
from luthier.optim.build import build_optimizer
from luthier.optim.optimizer import Optimizer

SHAPES = {
    "layers.0.up.weight": (24, 16),
    "layers.0.up.bias": (24,),
    "layers.0.down.weight": (16, 24),
    "norm.weight": (16,),
}
RATE, DECAY = 1e-2, 0.1
TORCH: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda ps, decay: torch.optim.AdamW(ps, RATE, weight_decay=decay, fused=True),
    "sgd": lambda ps, decay: torch.optim.SGD(ps, RATE),
    "sgd_nesterov": lambda ps, decay: torch.optim.SGD(ps, RATE, momentum=0.9, nesterov=True),
    "adafactor": lambda ps, decay: torch.optim.Adafactor(ps, RATE, weight_decay=decay),
}
OURS = {
    "adamw": {"name": "adamw", "weight_decay": DECAY},
    "sgd": {"name": "sgd"},
    "sgd_nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "adafactor": {"name": "adafactor", "weight_decay": DECAY},
}


def config(fields: dict[str, object]) -> OptimizerConfig:
    return TypeAdapter(OptimizerConfig).validate_python({"learning_rate": RATE, **fields})


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


def train(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter], steps: range, dtype: torch.dtype, **how: object
) -> None:
    for step in steps:
        for name, gradient in gradients(step, dtype).items():
            parameters[name].grad = gradient
        optimizer.step(**how)


def torch_reference(rule: str, dtype: torch.dtype, steps: int, factor: float = 1.0) -> dict[str, nn.Parameter]:
    parameters = weights(dtype)
    matrices = [p for p in parameters.values() if p.ndim == 2]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    optimizers = [TORCH[rule](matrices, DECAY), TORCH[rule](vectors, 0.0)]
    for step in range(steps):
        for name, gradient in gradients(step, dtype).items():
            parameters[name].grad = gradient * factor
        for optimizer in optimizers:
            optimizer.step()
    return parameters


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", list(OURS))
def test_same_as_torch(rule: str, dtype: torch.dtype, factor: float) -> None:
    ours = weights(dtype)
    optimizer = build_optimizer(ours.items(), config(OURS[rule]))
    train(optimizer, ours, range(5), dtype, gradient_factor=torch.tensor(factor) if factor != 1.0 else 1.0)
    for name, theirs in torch_reference(rule, dtype, 5, factor).items():
        torch.testing.assert_close(ours[name], theirs, rtol=0, atol=0 if "sgd" not in rule else 1e-7)


def test_decay_of_sgd_is_decoupled() -> None:
    ours = weights(torch.float64)
    train(build_optimizer(ours.items(), config({"name": "sgd", "weight_decay": DECAY})), ours, range(1), torch.float64)
    for name, before in weights(torch.float64).items():
        decay = DECAY if before.ndim == 2 else 0.0
        expected = before * (1 - RATE * decay) - RATE * gradients(0, torch.float64)[name]
        torch.testing.assert_close(ours[name], expected.detach(), rtol=1e-14, atol=1e-14, check_dtype=False)


def test_muon_for_hidden_matrices_and_adamw_for_the_rest() -> None:
    ours, theirs = weights(torch.float32), weights(torch.float32)
    muon = config({"name": "muon", "weight_decay": DECAY, "adamw_learning_rate": 3e-3})
    optimizer = build_optimizer(ours.items(), muon, hidden_matrices=lambda name: "up" in name)
    train(optimizer, ours, range(4), torch.float32)
    hidden = torch.optim.Muon([theirs["layers.0.up.weight"]], RATE, DECAY, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(
        [
            {"params": [theirs["layers.0.down.weight"]], "weight_decay": DECAY},
            {"params": [theirs["layers.0.up.bias"], theirs["norm.weight"]], "weight_decay": 0.0},
        ],
        3e-3, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    for step in range(4):
        for name, gradient in gradients(step, torch.float32).items():
            theirs[name].grad = gradient
        hidden.step()
        rest.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize("rule", list(OURS))
def test_bf16_weights_follow_the_fp32_ones_exactly(rule: str) -> None:
    """The remainder completes a bf16 weight to the very fp32 weight that torch's optimizer arrives at."""
    ours = weights(torch.bfloat16)
    optimizer = build_optimizer(ours.items(), config(OURS[rule]))
    theirs = {name: nn.Parameter(p.detach().float()) for name, p in weights(torch.bfloat16).items()}
    reference = build_optimizer(theirs.items(), config(OURS[rule]))
    train(optimizer, ours, range(6), torch.float32)
    train(reference, theirs, range(6), torch.float32)
    for name, parameter in ours.items():
        bits = parameter.detach().float().view(torch.int32) + optimizer.state[parameter]["remainder"]
        assert torch.equal(bits.view(torch.float32), theirs[name].detach())
        torch.testing.assert_close(parameter.detach(), theirs[name].detach().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "fields",
    [{"name": "adamw"}, {"name": "stochastic_adamw"}, {"name": "stochastic_adamw", "state_dtype": "bf16"}],
)
def test_updates_smaller_than_a_bf16_digit_are_not_lost(fields: dict[str, object]) -> None:
    """200 updates of 5e-6 on weights of 1.0, whose bf16 digit is 0.0039 below and 0.0078 above."""
    parameter = nn.Parameter(torch.ones(4096, 1, dtype=torch.bfloat16))
    optimizer = build_optimizer([("w.weight", parameter)], config({**fields, "learning_rate": 5e-6}))
    for _ in range(200):
        parameter.grad = torch.ones(4096, 1)
        optimizer.step()
    exact = parameter.detach().float()
    if "remainder" in optimizer.state[parameter]:
        exact = (exact.view(torch.int32) + optimizer.state[parameter]["remainder"]).view(torch.float32)
    assert exact.mean().item() == pytest.approx(1 - 1e-3, abs=2e-4 if fields["name"] != "adamw" else 1e-5)


def test_stochastic_adamw_is_right_on_average() -> None:
    """One update, many times: the mean of the bf16 weights is the fp32 result."""
    count = 20_000
    start, gradient = torch.linspace(-1, 1, 8).bfloat16(), torch.linspace(0.5, 2, 8)
    many = nn.Parameter(start.repeat(count, 1))
    optimizer = build_optimizer([("w.weight", many)], config({"name": "stochastic_adamw", "learning_rate": 3e-3}))
    many.grad = gradient.repeat(count, 1)
    optimizer.step()
    single = nn.Parameter(start.float())
    single.grad = gradient
    torch.optim.AdamW([single], 3e-3, weight_decay=0.0).step()
    rounded = many.detach().double()
    error = rounded.mean(0) - single.detach().double()
    assert (error.abs() <= 5 * rounded.std(0) / count**0.5 + 1e-9).all()


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_bf16_moments_stay_true(state_dtype: str) -> None:
    """The second moment decays by a thousandth a step, which rounding to nearest would never show."""
    parameter = nn.Parameter(torch.zeros(1000, 10, dtype=torch.bfloat16))
    optimizer = build_optimizer(
        [("w.weight", parameter)], config({"name": "stochastic_adamw", "state_dtype": state_dtype})
    )
    squares = optimizer.state[parameter]["exp_avg_sq"]
    assert squares.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[state_dtype]
    for step in range(101):
        parameter.grad = torch.full((1000, 10), 1.0 if step == 0 else 0.0)
        optimizer.step()
    assert squares.double().mean().item() == pytest.approx(1e-3 * 0.999**100, rel=2e-3)


def test_reproducible_whatever_else_draws_random_numbers() -> None:
    results = []
    for seed in (7, 7, 8):
        ours = weights(torch.bfloat16)
        optimizer = build_optimizer(ours.items(), config({"name": "stochastic_adamw"}), seed=seed)
        before = torch.get_rng_state()
        train(optimizer, ours, range(3), torch.float32)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(seed)
        results.append(torch.cat([p.detach().flatten() for p in ours.values()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_parameters_of_the_same_value_get_bits_of_their_own() -> None:
    twins = {f"{i}.weight": nn.Parameter(torch.ones(600, 600, dtype=torch.bfloat16)) for i in range(2)}
    optimizer = build_optimizer(twins.items(), config({"name": "stochastic_adamw", "learning_rate": 3e-3}))
    for parameter in twins.values():
        parameter.grad = torch.ones(600, 600)
    optimizer.step()
    first, second = (p.detach() for p in twins.values())
    assert 0.3 < (first != second).double().mean() < 0.6  # independent and about 3:5 up: unequal in 47 %
    assert not torch.equal(first[:300], first[300:])


@pytest.mark.parametrize("name", ["adamw", "stochastic_adamw"])
def test_size_of_the_pieces_only_moves_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (7, 100, 1 << 20):
        monkeypatch.setattr(implementation, "_CPU_PIECE", limit)
        dtype = torch.bfloat16 if name == "stochastic_adamw" else torch.float32
        ours = weights(dtype)
        optimizer = build_optimizer(ours.items(), config({"name": name}))
        train(optimizer, ours, range(3), torch.float32)
        results.append(torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in ours.values()]))
    torch.testing.assert_close(results[0], results[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(results[1], results[2], rtol=1e-6, atol=0)


def test_gradients_of_bf16_weights_add_up_in_fp32_and_are_left_alone() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16)
    optimizer = build_optimizer(layer.named_parameters(), config({"name": "adamw"}))
    for _ in range(3):
        layer(torch.randn(5, 8, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    before = layer.weight.grad.clone()
    optimizer.step(gradient_factor=0.1)
    assert torch.equal(layer.weight.grad, before)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    ours = weights(torch.float32)
    optimizer = build_optimizer(ours.items(), config({"name": "adamw", "weight_decay": DECAY}))
    for name, gradient in gradients(0, torch.float32).items():
        ours[name].grad = None if name == "norm.weight" else gradient
    optimizer.step()
    assert torch.equal(ours["norm.weight"], weights(torch.float32)["norm.weight"])
    assert [optimizer.state[p]["step"] for p in ours.values()] == [1, 1, 1, 0]


def test_what_decays() -> None:
    names = {
        "model.embed_tokens.weight": (9, 4), "model.layers.0.self_attn.q_norm.weight": (2, 4), "lm_head.weight": (9, 4),
        "model.layers.0.mlp.experts.gate_up_proj": (2, 4, 4), "model.layers.0.mlp.experts.gate_up_proj_bias": (2, 4),
        "model.layers.0.q_proj.lora_A.weight": (2, 4), "model.layers.0.q_proj.bias": (4,),
    }  # fmt: skip
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}
    optimizer = build_optimizer(parameters.items(), config({"name": "adamw", "weight_decay": DECAY}))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert [name for name, p in parameters.items() if id(p) in decayed] == [
        "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.q_proj.lora_A.weight",
    ]  # fmt: skip


def test_frozen_parameters_and_refusals() -> None:
    ours = weights(torch.float32)
    ours["norm.weight"].requires_grad_(False)
    optimizer = build_optimizer(ours.items(), config({"name": "adamw"}))
    assert isinstance(optimizer, Optimizer)
    assert ours["norm.weight"] not in optimizer.state
    with pytest.raises(UserError, match="none that trains is bf16"):
        build_optimizer(ours.items(), config({"name": "stochastic_adamw"}))
    with pytest.raises(UserError, match="no parameter trains"):
        build_optimizer([("norm.weight", ours["norm.weight"])], config({"name": "adamw"}))
