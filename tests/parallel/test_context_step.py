"""Whole steps with context parallelism and what is beside it, against one process of plain Transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from luthier.batch import Batch
from luthier.engine.step import forward_backward
from luthier.hf.debug.tiny import debug_config
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import measure, microbatches, ready, whole

NINE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": NINE | {"tie_word_embeddings": True},
    "mistral": {},
    "falcon": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_strong(debug_config(kind, **changes), root / kind) for kind, changes in KINDS.items()}


def reference(path: Path) -> Reference:
    samples = documents()
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    return weighted_sum(plain_model(path, torch.float64), samples, factor)


LAYOUTS: list[dict[str, int]] = [{"cp": 2}, {"cp": 4}, {"dp_shard": 2, "cp": 2}, {"pp": 2, "cp": 2}, {"tp": 2, "cp": 2}]
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind != "llama" or "tp" not in layout]  # nine heads


def check(results: list[dict[str, Any]], expected: Reference, bound: float = 1e-10) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    gathered: dict[str, torch.Tensor] = {}
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(expected.loss, rel=bound / 100)
        assert result["validation"] == pytest.approx(expected.loss, rel=bound / 100)
        assert result["norm"] == pytest.approx(norm, rel=bound)
        gathered |= result["gradients"]
    assert gradient_error(gathered, expected.gradients) < bound


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_step_on_shared_rows(world: Any, models: dict[str, Path], kind: str, layout: dict[str, int]) -> None:
    results = world(math.prod(layout.values())).run(measure, models[kind], layout, documents())
    check(results, reference(models[kind]))
    part, parts = 0, layout.get("dp_shard", 1)
    lengths = [batch.tokens for batch in microbatches(documents(), part, parts)]
    assert [len(logprobs) for logprobs in results[0]["logprobs"]] == lengths


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_ones_own_choice_sees_the_whole_row(world: Any, models: dict[str, Path], attention: str) -> None:
    results = world(2).run(measure, models["qwen3"], {"cp": 2}, documents(), attention=attention)
    check(results, reference(models["qwen3"]), 1e-6)  # fp32 in norms of queries and keys, and in eager's softmax


def _squares(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A loss in which positions of different ranks multiply one another."""
    return (logprobs * batch.weights[0]).sum().square() / 1000


def own_loss(path: Path) -> tuple[float, dict[str, torch.Tensor]]:
    state = ready(path, {"cp": 2})
    output = forward_backward(state, Batch.pack(documents()), _squares)
    return float(output.loss), {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}


def test_a_loss_of_ones_own_sees_the_whole_row(world: Any, models: dict[str, Path]) -> None:
    plain = plain_model(models["qwen3"], torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for sample in documents():
        logits = plain(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0]
        losses = F.cross_entropy(logits, torch.from_numpy(sample.targets), reduction="none")
        total = total - (losses * torch.from_numpy(sample.weights)).sum()
    expected = total.square() / 1000
    expected.backward()
    for loss, gradients in world(2).run(own_loss, models["qwen3"]):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        theirs = {name: p.grad for name, p in plain.named_parameters()}
        assert gradient_error(gradients, theirs) < 1e-10
