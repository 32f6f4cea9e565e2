"""Weights that are not sharded as others are: kept in fp32 (routers, decays), or joined with others in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.hf.tiny import debug_config
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import measure


@pytest.mark.parametrize("kind", ["bailing_hybrid", "deepseek_v4", "hrm_text", "kimi_linear"])
def test_gradients_are_those_of_one_process(world: Any, tmp_path: Path, kind: str) -> None:
    path = save_strong(debug_config(kind), tmp_path / kind)
    samples = documents(lengths=[9, 14, 7, 11])
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    expected = weighted_sum(plain_model(path, torch.float64), samples, factor)
    for result in world(2).run(measure, path, {"dp_shard": 2}, samples):
        assert not set(result["missing"]) & expected.gradients.keys()
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert gradient_error(result["gradients"], expected.gradients) < 1e-4
