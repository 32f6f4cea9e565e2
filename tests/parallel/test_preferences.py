"""Preference steps on layouts: loss, rewards and gradients are those of one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from luthier.config import RunConfig
from luthier.config.sections import SGDConfig
from luthier.data.loader import Rows, StepBatch, build_rows, pack
from luthier.data.state import LoaderState
from luthier.engine.build import build_state
from luthier.engine.initial import Initial
from luthier.engine.prefixes import prefix_fault
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.source import resolve
from luthier.parallel.norm import settle
from luthier.recipes import kto, methods, pairs
from luthier.recipes.references import sums_of
from tests.oracles.plain import gradient_error, save_strong
from tests.parallel.cases import ready, whole
from tests.recipes.preferences import LABELLED, PAIRS

LAYOUTS: list[dict[str, int]] = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}]
METHODS: list[dict[str, Any]] = [
    {"name": "dpo", "cross_entropy": 0.3},
    {"name": "orpo", "train_on_prompt": True},
    {"name": "kto"},
]


def step(path: Path, rows_file: Path, layout: dict[str, int] | None, method: dict[str, Any]) -> dict[str, Any]:
    """One step of eight rows, three microbatches on each data rank; and the log-probabilities before it."""
    if layout is None:
        optimizer = SGDConfig(name="sgd", learning_rate=0.1)
        device = torch.device("cpu")
        state = build_state(resolve(str(path)), adapter=None, optimizer=optimizer, precision="fp64", device=device)
    else:
        state = ready(path, layout)
    values = {"model": str(path), "data": {"train": str(rows_file), "sequence_length": 256, "cache": False}}
    config = RunConfig.model_validate(values | {"method": method})
    rows = build_rows(config.data, "train", debug_tokenizer())
    assert isinstance(rows, Rows)
    sums, tokens = sums_of(state, rows, np.arange(len(rows)), sequence_length=256, packing=True, share_prefixes=True)
    # a reference that is not the model itself, so that gains are not all 0
    reference = sums + np.sin(np.arange(sums.size)).reshape(sums.shape)
    run: Any = SimpleNamespace(config=config, state=state, rows=rows, initial=None, reference=reference)
    mesh = state.mesh
    rank, ranks = (mesh.data_rank, mesh.data_ranks) if mesh is not None else (0, 1)
    own = list(range(8))[rank::ranks]
    dealt = [own[0:1], own[1:], []]  # one that only takes part
    batch = StepBatch([pack([rows[n] for n in numbers]) for numbers in dealt], LoaderState(), 8, 0, 0, 0.0, 1.0)
    losses: list[torch.Tensor] = []

    def recorded(run: Any, batch: Any, outputs: Any) -> dict[str, float]:
        losses.append(torch.stack([output.loss for output in outputs]).sum())
        return {}

    with patch.object(pairs, "update", recorded), patch.object(kto, "update", recorded):
        measured = methods.recipe_of(config).take_step(run, batch)
    total = losses[0] if mesh is None else mesh.sum(losses[0])
    if mesh is not None:
        settle(state.trainable.values())
    if state.pipeline is not None:
        state.pipeline.settle()
    gradients = {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}
    fault = prefix_fault(state)
    return {"loss": float(total), "gradients": gradients, "sums": sums, "tokens": tokens, "fault": fault, **measured}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_strong(debug_config("gpt_neox", layers=4), tmp_path_factory.mktemp("models") / "neox")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_a_step_on_a_layout_is_that_of_one_process(
    world: Any, path: Path, tmp_path: Path, layout: dict[str, int], method: dict[str, Any]
) -> None:
    file = tmp_path / "rows.jsonl"
    rows = LABELLED if method["name"] == "kto" else PAIRS
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = step(path, file, None, method)
    results = world(math.prod(layout.values())).run(step, path, file, layout, method)
    together: dict[str, torch.Tensor] = {}
    for result in results:
        np.testing.assert_allclose(result["sums"], expected["sums"], rtol=1e-10)
        np.testing.assert_array_equal(result["tokens"], expected["tokens"])
        told = {name: value for name, value in result.items() if name == "loss" or "reward" in name}
        assert told == pytest.approx({name: expected[name] for name in told}, rel=1e-9)
        together |= result["gradients"]
        assert ("context parallelism" in result["fault"]) == ("cp" in layout)
    assert gradient_error(together, expected["gradients"]) < 1e-10


def swapped(path: Path, layout: dict[str, int]) -> bool:
    """Whether weights that a step has changed are the first ones within `restored`, and the changed ones after it."""
    state = ready(path, layout)
    before = {name: whole(p.detach()) for name, p in state.trainable.items()}
    initial = Initial(state)
    with torch.no_grad():
        for parameter in state.trainable.values():
            parameter.add_(1.0)
    changed = {name: whole(p.detach()) for name, p in state.trainable.items()}
    with initial.restored(state):
        same = all(torch.equal(whole(p.detach()), before[name]) for name, p in state.trainable.items())
    return same and all(torch.equal(whole(p.detach()), changed[name]) for name, p in state.trainable.items())


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_the_first_weights_come_back_for_a_while(world: Any, path: Path, layout: dict[str, int]) -> None:
    assert all(world(2).run(swapped, path, layout))
