"""Pipelines of 2 and 4 ranks: the numbers of plain Transformers, and of gradient accumulation bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.hf.tiny import debug_config
from luthier.parallel.programs import PROGRAMS
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong, weighted_sum
from tests.parallel.cases import documents, measure

TYPES = {
    "qwen3": 1e-10,
    "llama": 1e-10,
    "gemma2": 1e-6,
    "gemma3_text": 1e-6,
    "cohere2": 1e-6,
    "mistral": 1e-10,
    "granite": 1e-10,
    "gpt2": 1e-10,
    "falcon": 1e-10,
    "mixtral": 1e-6,
}
"""Bounds in float64; some types cast to fp32 inside."""
TIED = {"llama": {"tie_word_embeddings": True}, "qwen3": {"tie_word_embeddings": False}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_strong(debug_config(kind, layers=4, **TIED.get(kind, {})), root / kind) for kind in TYPES}


def reference(path: Path) -> Reference:
    samples = documents()
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    return weighted_sum(plain_model(path, torch.float64), samples, factor)


def check(results: list[dict[str, Any]], expected: Reference, bound: float) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=bound)
        for name, gradient in result["gradients"].items():
            assert torch.equal(gradient, together.setdefault(name, gradient)), name
    assert gradient_error(together, expected.gradients) < bound


@pytest.mark.parametrize("kind", TYPES)
def test_two_stages(world: Any, models: dict[str, Path], kind: str) -> None:
    check(world(2).run(measure, models[kind], {"pp": 2}, documents()), reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mixtral", "falcon"])
@pytest.mark.parametrize("schedule", [name for name in PROGRAMS if name != "1f1b"])
def test_schedules(world: Any, models: dict[str, Path], schedule: str, kind: str) -> None:
    results = world(2).run(measure, models[kind], {"pp": 2}, documents(), pipeline_schedule=schedule)
    check(results, reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "gpt2"])
def test_four_stages(world: Any, models: dict[str, Path], kind: str) -> None:
    check(world(4).run(measure, models[kind], {"pp": 4}, documents()), reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize("schedule", PROGRAMS)
def test_with_shards(world: Any, models: dict[str, Path], schedule: str) -> None:
    results = world(4).run(measure, models["qwen3"], {"pp": 2, "dp_shard": 2}, documents(), pipeline_schedule=schedule)
    check(results, reference(models["qwen3"]), TYPES["qwen3"])
