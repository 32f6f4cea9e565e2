"""What tests of preference methods share: rows, a run that is open in float64, one step of it and its gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from luthier.config import RunConfig
from luthier.data.loader import Rows, StepBatch, pack
from luthier.data.state import LoaderState
from luthier.engine.build import build_network, build_state
from luthier.recipes import kto, methods, pairs, setup
from luthier.recipes.run import Run, opened

WORDS = ["spruce", "maple", "ebony", "rosewood", "bone", "pearl", "cedar", "walnut", "ash", "pear"]
PAIRS = [
    {
        "prompt": f"Question: what is {word} good for?\nAnswer:",
        "chosen": f" For the {'top' if number % 2 else 'back of the neck'}, I would say {word}.",
        "rejected": f" {word}" * (1 + number % 3),
    }
    for number, word in enumerate(WORDS)
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row["chosen" if number % 2 else "rejected"], "label": number % 3 != 0}
    for number, row in enumerate(PAIRS)
]


def config_of(model: Path | str, rows: Sequence[dict[str, Any]], scratch: Path, method: Any, **more: Any) -> RunConfig:
    path = scratch / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": str(model),
        "tokenizer": "debug:llama",
        "data": {"train": str(path), "sequence_length": 256},
        "method": method,
        "train": {"epochs": 1, "rows_per_step": len(rows), "precision": "fp32"},
        "output": str(scratch / "run"),
    }
    return RunConfig.model_validate(values | more)


@contextmanager
def double() -> Iterator[None]:
    """Runs in float64, which no config asks for."""

    def state(**how: Any) -> Any:
        return lambda source, **given: build_state(source, **(given | how))

    def network(**how: Any) -> Any:
        return lambda source, **given: build_network(source, **(given | how))

    with ExitStack() as stack:
        stack.enter_context(patch.object(setup, "build_state", state(precision="fp64")))
        stack.enter_context(patch.object(setup, "build_network", network(precision="fp64")))
        yield


def step_of(run: Run, microbatches: Sequence[Sequence[int]]) -> StepBatch:
    """A global batch of these rows, microbatch by microbatch."""
    assert isinstance(run.rows, Rows)
    made = [pack([run.rows[number] for number in numbers]) for numbers in microbatches]
    rows = sum(map(len, microbatches))
    weight = sum(batch.total_weight for batch in made)
    tokens, trained = sum(batch.tokens for batch in made), sum(batch.trained_tokens for batch in made)
    return StepBatch(made, LoaderState(), rows, tokens, trained, weight, 1.0)


def one_step(
    config: RunConfig, microbatches: Sequence[Sequence[int]]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What one step on these rows measures, and its gradients before they are applied."""
    gradients: dict[str, torch.Tensor] = {}

    def recorded(run: Run, batch: StepBatch, outputs: Any) -> dict[str, float]:
        gradients.update({n: p.grad.clone() for n, p in run.state.trainable.items() if p.grad is not None})
        loss = torch.stack([output.loss for output in outputs]).sum()
        return {"loss": float(loss)}

    with ExitStack() as stack:
        for module in (pairs, kto):
            stack.enter_context(patch.object(module, "update", recorded))
        run = stack.enter_context(opened(config, "never"))
        measured = methods.recipe_of(config).take_step(run, step_of(run, microbatches))
    return dict(measured), gradients
