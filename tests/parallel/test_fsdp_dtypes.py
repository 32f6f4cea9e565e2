"""Weights that are not sharded as others are: kept in fp32 (routers, decays, heads), joined with others in checkpoints,
or with fewer experts than there are ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.hf.debug.tiny import debug_config
from luthier.parallel.fsdp import leaves_some_without
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import measure

BOUNDS = {"bailing_hybrid": 1e-4, "deepseek_v4": 1e-4, "hrm_text": 1e-4, "kimi_linear": 1e-4, "hunyuan_v1_moe": 1e-10}
"""Of gradients; most of these compute in fp32 inside."""


@pytest.mark.parametrize("kind", BOUNDS)
def test_gradients_are_those_of_one_process(world: Any, tmp_path: Path, kind: str) -> None:
    path = save_strong(debug_config(kind), tmp_path / kind)
    samples = documents(lengths=[9, 14, 7, 11])
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    expected = weighted_sum(plain_model(path, torch.float64), samples, factor)
    for result in world(2).run(measure, path, {"dp_shard": 2}, samples):
        assert not set(result["missing"]) & expected.gradients.keys()
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert gradient_error(result["gradients"], expected.gradients) < BOUNDS[kind]


@pytest.mark.parametrize(("slices", "shards", "without"), [(1, 2, True), (3, 2, False), (4, 4, False), (5, 4, True)])
def test_which_cuts_leave_a_rank_with_nothing(slices: int, shards: int, without: bool) -> None:
    parts = torch.zeros(slices, 2).chunk(shards)
    assert (len(parts) < shards) is leaves_some_without(torch.zeros(slices, 2), shards) is without
