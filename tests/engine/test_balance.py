"""Auxiliary loss and moving biases: what plain Transformers makes of the whole batch, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig, MoeConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.checkpoint import Checkpointer, committed
from luthier.engine.evaluate import evaluate
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from tests.oracles.plain import gradient_error, plain_model, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches, ready, whole

KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "dbrx", "jetmoe"]
COEFFICIENT = 0.7
"""So large that the loss of the experts is a good part of every gradient."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("balance")
    kinds = [*KINDS, "deepseek_v3", "glm4_moe"]
    return {kind: save_strong(debug_config(kind), root / kind) for kind in kinds}


def routed(model: Any, samples: Sequence[Sample]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The loss of each document alone, summed, and every layer's router logits of all documents."""
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    total, layers = torch.zeros((), dtype=torch.float64), []
    for sample in samples:
        output = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False, output_router_logits=True)
        losses = F.cross_entropy(output.logits[0].double(), torch.from_numpy(sample.targets), reduction="none")
        total = total + (losses * torch.from_numpy(sample.weights)).sum() * factor
        layers.append([logits.reshape(-1, logits.shape[-1]) for logits in output.router_logits])
    return total, tuple(torch.cat(parts) for parts in zip(*layers, strict=True))


def reference(path: Path, samples: Sequence[Sample]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, auxiliary loss and gradients of plain Transformers on the whole batch."""
    import sys

    model = plain_model(path, torch.float64)
    loss, layers = routed(model, samples)
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    auxiliary = function(layers, layers[0].shape[-1], model.num_experts_per_tok)
    (loss + COEFFICIENT * auxiliary).backward()
    return (
        float(loss.detach()),
        float(auxiliary.detach()),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def one(path: Path, moe: MoeConfig, **how: Any) -> TrainState:
    how = {"adapter": None, **how}
    return build_state(
        resolve(str(path)),
        optimizer=SGDConfig(name="sgd", learning_rate=0.1),
        precision="fp64",
        device=torch.device("cpu"),
        moe=moe,
        **how,
    )


def run(state: TrainState, batches: list[Batch]) -> tuple[float, float, dict[str, torch.Tensor]]:
    outputs = forward_backward_all(state, batches)
    loss = torch.stack([output.loss for output in outputs]).sum()
    loss = state.mesh.sum(loss) if state.mesh is not None else loss
    assert state.balance is not None
    gradients = {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}
    return float(loss), state.balance.auxiliary, gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_auxiliary_loss_in_one_process(models: dict[str, Path], kind: str, count: int) -> None:
    state = one(models[kind], MoeConfig(aux_loss=COEFFICIENT))
    evaluate(state, microbatches(documents(), 0, 1))  # what is measured in between is not counted
    state.model.train()
    loss, auxiliary, gradients = run(state, microbatches(documents(), 0, 1, count))
    expected = reference(models[kind], documents())
    assert loss == pytest.approx(expected[0], rel=1e-7)
    assert auxiliary == pytest.approx(expected[1], rel=1e-6)
    assert gradient_error(gradients, expected[2]) < 1e-6


def test_recomputation_changes_nothing(models: dict[str, Path]) -> None:
    plain, again = (
        run(one(models["mixtral"], MoeConfig(aux_loss=1.0), activation_checkpointing=policy), batches)
        for policy, batches in (("off", microbatches(documents(), 0, 1)), ("full", microbatches(documents(), 0, 1)))
    )
    assert plain[:2] == again[:2]
    assert gradient_error(again[2], plain[2]) < 1e-12


def on_ranks(
    path: Path, layout: dict[str, int], count: int, **how: Any
) -> tuple[float, float, dict[str, torch.Tensor]]:
    state = ready(path, layout, moe=MoeConfig(aux_loss=COEFFICIENT), **how)
    assert state.mesh is not None
    batches = microbatches(documents(), state.mesh.data_rank, state.mesh.data_ranks, count)
    return run(state, batches)


LAYOUTS: list[tuple[int, dict[str, Any], int]] = [
    (2, {"dp_shard": 2, "ep": 2}, 1),
    (2, {"dp_shard": 2}, 2),
    (2, {"cp": 2}, 2),
    (2, {"tp": 2, "ep": 2, "sequence_parallel": True}, 1),
    (2, {"pp": 2}, 3),
]


@pytest.mark.parametrize(("ranks", "layout", "count"), LAYOUTS, ids=str)
def test_auxiliary_loss_on_layouts(
    world: Any, models: dict[str, Path], ranks: int, layout: dict[str, Any], count: int
) -> None:
    expected = reference(models["mixtral"], documents())
    results = world(ranks).run(on_ranks, models["mixtral"], layout, count)
    found: dict[str, torch.Tensor] = {}
    for loss, auxiliary, gradients in results:
        assert loss == pytest.approx(expected[0], rel=1e-7)
        assert auxiliary == pytest.approx(expected[1], rel=1e-6)
        found |= gradients
    assert gradient_error(found, expected[2]) < 1e-6


def test_as_transformers_when_nothing_is_said(models: dict[str, Path], tmp_path: Path) -> None:
    assert one(models["mixtral"], MoeConfig()).balance is None
    config = debug_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.25)
    path = save_strong(config, tmp_path / "asks")
    asked = one(path, MoeConfig())
    assert asked.balance is not None
    assert asked.balance.coefficient == 0.25
    assert one(path, MoeConfig(aux_loss=0.0)).balance is None


def counts(model: Any, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """How often each expert of each layer is chosen by an unmodified model."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(
                lambda module, inputs, name=name: found.update(
                    {name: found.get(name, 0) + torch.bincount(inputs[1].flatten(), minlength=4)}
                )
            )
    for sample in samples:
        model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False)
    return found


def moved(path: Path, layout: dict[str, int] | None, rate: float) -> dict[str, torch.Tensor]:
    """The biases after one step that changes no weight."""
    moe = MoeConfig(bias_update_rate=rate)
    if layout is None:
        state = one(path, moe, activation_checkpointing="full")
        batches = microbatches(documents(), 0, 1, 3)
    else:
        state = ready(path, layout, moe=moe)
        assert state.mesh is not None
        batches = microbatches(documents(), state.mesh.data_rank, state.mesh.data_ranks)
    evaluate(state, batches)
    state.model.train()
    forward_backward_all(state, batches)
    optim_step(state, learning_rate_factor=0.0)
    return {name: value.clone() for name, value in state.model.named_buffers() if name.endswith("correction_bias")}


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_biases_move_towards_balance(world: Any, models: dict[str, Path], kind: str) -> None:
    model = plain_model(models[kind], torch.float64)
    before = {name: value.clone() for name, value in model.named_buffers() if name.endswith("correction_bias")}
    expected = {}
    for name, chosen in counts(model, documents()).items():
        bias = f"{name.removesuffix('experts')}gate.e_score_correction_bias"
        expected[bias] = before[bias] + 0.125 * (chosen.double().mean() - chosen).sign()
    assert len(expected) > 0
    found = [moved(models[kind], None, 0.125)]
    found += world(2).run(moved, models[kind], {"dp_shard": 2, "ep": 2}, 0.125)
    found += world(2).run(moved, models[kind], {"cp": 2}, 0.125)
    for biases in found:
        assert biases.keys() == before.keys()
        assert all(torch.equal(biases[name], expected[name].to(biases[name].dtype)) for name in expected)


def test_checkpoints_hold_the_biases(models: dict[str, Path], tmp_path: Path) -> None:
    state = one(models["deepseek_v3"], MoeConfig(bias_update_rate=0.5))
    forward_backward_all(state, microbatches(documents(), 0, 1))
    optim_step(state)
    names = [name for name, _ in state.model.named_buffers() if name.endswith("correction_bias")]
    assert names
    checkpoints = Checkpointer(tmp_path, asynchronous=False)
    checkpoints.save(state, {})
    again = one(models["deepseek_v3"], MoeConfig())
    checkpoints.load(again, committed(tmp_path)[-1])
    assert all(torch.equal(again.model.get_buffer(name), state.model.get_buffer(name)) for name in names)


def test_a_step_that_is_not_applied_moves_nothing(models: dict[str, Path]) -> None:
    state = one(models["deepseek_v3"], MoeConfig(bias_update_rate=1.0))
    before = {name: value.clone() for name, value in state.model.named_buffers()}
    forward_backward_all(state, microbatches(documents(), 0, 1))
    assert not optim_step(state, loss=float("nan")).applied
    assert all(torch.equal(value, before[name]) for name, value in state.model.named_buffers())


@pytest.mark.parametrize(
    ("kind", "moe", "adapter", "said"),
    [
        ("deepseek_v3", MoeConfig(aux_loss=0.1), None, "no auxiliary loss in Transformers; use moe.bias_update_rate"),
        ("mixtral", MoeConfig(bias_update_rate=0.1), None, "have no biases that choose experts; use moe.aux_loss"),
        ("deepseek_v3", MoeConfig(bias_update_rate=0.1), LoraConfig(rank=4), "biases are no part of an adapter"),
    ],
)
def test_what_cannot_be_is_refused(
    models: dict[str, Path], kind: str, moe: MoeConfig, adapter: LoraConfig | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        one(models[kind], moe, adapter=adapter)
