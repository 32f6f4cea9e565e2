"""Distillation: losses and gradients are those of TRL's generalised divergence in float64, on layouts too."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.engine.build import build_network
from luthier.engine.distill import Distillation
from luthier.engine.step import forward_backward_all
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from luthier.losses import distill
from luthier.parallel.norm import settle
from tests.oracles.plain import gradient_error, plain_model, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches, ready, whole

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of being experimental
    from trl.experimental.gkd import GKDTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher of another architecture, size and rounding."""
    student = save_strong(debug_config("llama"), tmp_path_factory.mktemp("models") / "student")
    teacher = save_strong(debug_config("qwen3", layers=3), tmp_path_factory.mktemp("models") / "teacher", seed=7)
    return student, teacher


def expected(models: tuple[Path, Path], how: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """By plain Transformers, document by document, with TRL's function where it has one."""
    student, teacher = (plain_model(path, torch.float64) for path in models)
    samples = documents()
    total = sum(float(sample.weights.sum()) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    temperature, share = how.get("temperature", 1.0), how.get("cross_entropy", 0.0)
    for sample in samples:
        ids, weights = torch.from_numpy(sample.tokens)[None], torch.from_numpy(sample.weights).double()
        logits = student(ids, use_cache=False).logits[0]
        with torch.no_grad():
            taught = teacher(ids, use_cache=False).logits[0]
        own = logits.log_softmax(-1).gather(1, torch.from_numpy(sample.targets)[:, None])[:, 0]
        each = torch.stack([_apart(logits[t : t + 1], taught[t : t + 1], how, temperature) for t in range(len(ids[0]))])
        loss = loss + (weights * ((1 - share) * each - share * own)).sum() / total
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def _apart(logits: torch.Tensor, taught: torch.Tensor, how: dict[str, Any], temperature: float) -> torch.Tensor:
    """The divergence of one position."""
    kind, beta = how.get("kind", "forward"), how.get("beta", 0.5)
    if how.get("top_k"):
        q, p = ((each / temperature).softmax(-1) for each in (logits, taught))
        best = p.topk(how["top_k"]).indices
        q, p = (torch.cat([each.gather(1, best), 1 - each.gather(1, best).sum(1, keepdim=True)], 1) for each in (q, p))
        logits, taught, temperature = q.log(), p.log(), 1.0
    weights = {"forward": [(0.0, 1.0)], "reverse": [(1.0, 1.0)], "symmetric": [(0.0, 0.5), (1.0, 0.5)]}
    parts = weights.get(kind, [(beta, 1.0)])
    found = [
        factor
        * GKDTrainer.generalized_jsd_loss(logits[None], taught[None], None, side, temperature, num_items_in_batch=1)
        for side, factor in parts
    ]
    return torch.stack(found).sum()


CASES: list[dict[str, Any]] = [
    {},
    {"kind": "reverse", "temperature": 2.0},
    {"kind": "symmetric", "cross_entropy": 0.25},
    {"kind": "jsd", "beta": 0.3, "temperature": 0.7},
    {"kind": "jsd", "beta": 0.0},
    {"kind": "jsd", "beta": 1.0},
    {"kind": "forward", "top_k": 5, "temperature": 1.5, "cross_entropy": 0.5},
    {"kind": "jsd", "top_k": 3},
]


def measured(models: tuple[Path, Path], how: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    """Loss and gradients on a layout, of this rank's stage."""
    student, teacher = models
    state = ready(student, layout)
    network = build_network(resolve(str(teacher)), adapter=None, precision="fp64")
    network.model.eval().requires_grad_(False)
    mesh = state.mesh
    assert mesh is not None
    batches = microbatches(documents(), mesh.data_rank, mesh.data_ranks)
    outputs = forward_backward_all(state, batches, Distillation(network, **how))
    settle(state.trainable.values())
    if state.pipeline is not None:
        state.pipeline.settle()
    return {
        "loss": float(mesh.sum(torch.stack([output.loss for output in outputs]).sum())),
        "gradients": {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None},
    }


@pytest.mark.parametrize("how", CASES, ids=str)
def test_loss_and_gradients_are_those_of_trl(world: Any, models: tuple[Path, Path], how: dict[str, Any]) -> None:
    [found] = world(1).run(measured, models, how, {})
    loss, gradients = expected(models, how)
    assert found["loss"] == pytest.approx(loss, rel=1e-10)
    assert gradient_error(found["gradients"], gradients) < 1e-10


@pytest.mark.parametrize("how", [CASES[3], CASES[6]], ids=["whole vocabulary", "top 5"])
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_layouts_change_nothing(
    world: Any, models: tuple[Path, Path], layout: dict[str, int], how: dict[str, Any]
) -> None:
    found = world(math.prod(layout.values())).run(measured, models, how, layout)
    loss, gradients = expected(models, how)
    together: dict[str, torch.Tensor] = {}
    for one in found:
        assert one["loss"] == pytest.approx(loss, rel=1e-10)
        together |= one["gradients"]
    assert gradient_error(together, gradients) < 1e-10


def test_what_is_never_said_counts_nothing() -> None:
    sure = torch.tensor([[0.0, -torch.inf]])
    even = torch.tensor([[0.5, 0.5]]).log()
    assert float(distill.divergence(even, sure, "forward")) == pytest.approx(math.log(2))
    assert float(distill.divergence(sure, even, "reverse")) == pytest.approx(math.log(2))
    assert math.isfinite(float(distill.divergence(sure, even, "jsd", 0.3)))
    assert distill.with_rest(sure[:, :1]).exp().sum() == pytest.approx(1.0)
