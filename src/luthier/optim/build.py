"""From the config's `optimizer` key to an optimizer over named parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, assert_never

import torch
from torch import nn

from luthier.config.sections import (
    AdafactorConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    StochasticAdamWConfig,
)
from luthier.errors import UserError
from luthier.optim.optimizer import Optimizer


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    *,
    adapters: Callable[[str], bool] | None = None,
    hidden_matrices: Callable[[str], bool] | None = None,
    rates: Callable[[str, torch.Tensor, float], float] | None = None,
    seed: int = 0,
    part: bool = False,
) -> Optimizer:
    """Make the optimizer of the parameters that train.

    Matrices decay, embeddings among them; biases, norms and other vectors do not. Gradients of bf16 parameters are set
    to add up in fp32 (`Tensor.grad_dtype`), since many microbatches in bf16 would lose the small ones.

    Args:
        named_parameters: a model's; frozen ones are passed over.
        config: which rule, and its numbers.
        adapters: which names are adapter weights. Under adamw these are bf16 and nothing else where they are bf16, with
            stochastic rounding; all other bf16 weights are exact in fp32 (docs/decisions/0001-bf16-weights.md).
        hidden_matrices: which names Muon may treat: matrices inside the layers, no embedding, no head.
        rates: name, parameter and the config's learning rate -> the rate of that parameter; one for all when left out.
        seed: of stochastic rounding.
        part: these are one stage's of a model, so that perhaps others train and none of them.

    Raises:
        UserError: if nothing trains, or stochastic_adamw finds no bf16 weight.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trained and part:  # torch refuses no groups, and takes an empty one
        return Optimizer([{**_hyperparameters(config, orthogonal=False), "params": []}], seed=seed)
    if not trained:
        raise UserError("no parameter trains", where="adapter", remedy="name a target that the model has")
    if config.name == "stochastic_adamw" and all(p.dtype != torch.bfloat16 for _, p in trained):
        raise UserError(
            "stochastic_adamw rounds bf16 weights, and none that trains is bf16",
            where="optimizer.name",
            remedy="use adamw, or set train.precision (with adapters: adapter.dtype) to bf16",
        )
    groups: dict[tuple[bool, bool, bool, float], dict[str, Any]] = {}
    for name, parameter in trained:
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
        stochastic = config.name == "stochastic_adamw" or (
            config.name == "adamw" and adapters is not None and adapters(name)
        )
        orthogonal = (
            config.name == "muon" and parameter.ndim == 2 and hidden_matrices is not None and hidden_matrices(name)
        )
        numbers = _hyperparameters(config, orthogonal=orthogonal)
        if rates is not None:
            numbers["lr"] = rates(name, parameter, numbers["lr"])
        key = (decays(name, parameter), stochastic, orthogonal, numbers["lr"])
        if key not in groups:
            groups[key] = {
                **numbers,
                "weight_decay": config.weight_decay if key[0] else 0.0,
                "rounding": "stochastic" if stochastic else "remainder",
                "state_dtype": getattr(config, "state_dtype", "fp32"),
                "params": [],
            }
        groups[key]["params"].append((name, parameter))
    return Optimizer(groups.values(), seed=seed)


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, unless they are norms or biases or marked by their model.

    >>> decays("model.layers.0.mlp.up_proj.weight", torch.empty(4, 4)), decays("model.norm.weight", torch.empty(4))
    (True, False)
    >>> decays("model.layers.0.mlp.experts.down_proj_bias", torch.empty(2, 4))
    False
    """
    *path, last = name.split(".")
    module = path[-1] if path else ""
    spared = getattr(parameter, "_no_weight_decay", False)  # set by state space models on their own matrices
    return parameter.ndim >= 2 and "bias" not in last and "norm" not in (module + last).lower() and not spared


def _hyperparameters(config: OptimizerConfig, *, orthogonal: bool) -> dict[str, Any]:
    match config:
        case AdamWConfig() | StochasticAdamWConfig():
            return {
                "rule": "adamw",
                "lr": config.learning_rate,
                "betas": tuple(config.betas),
                "epsilon": config.epsilon,
            }
        case SGDConfig():
            return {
                "rule": "sgd",
                "lr": config.learning_rate,
                "momentum": config.momentum,
                "nesterov": config.nesterov,
            }
        case AdafactorConfig():
            return {
                "rule": "adafactor",
                "lr": config.learning_rate,
                "beta2_decay": config.beta2_decay,
                "clip_threshold": config.clip_threshold,
            }
        case MuonConfig() if orthogonal:
            return {
                "rule": "muon",
                "lr": config.learning_rate,
                "momentum": config.momentum,
                "nesterov": config.nesterov,
                "ns_steps": config.ns_steps,
            }
        case MuonConfig():
            rate = config.learning_rate if config.adamw_learning_rate is None else config.adamw_learning_rate
            return {"rule": "adamw", "lr": rate, "betas": tuple(config.betas), "epsilon": config.epsilon}
    assert_never(config)
