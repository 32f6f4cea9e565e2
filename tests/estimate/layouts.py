"""Cases that run on every rank of a world: one step on a layout, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from tests.estimate.watch import Watch
from tests.parallel.cases import ready


def save_config(directory: Path, model_type: str, **fields: Any) -> Path:
    """A directory with the config of a model alone; its weights are random."""
    AutoConfig.for_model(model_type, **fields).save_pretrained(directory)
    return directory


def step(
    path: str,
    layout: dict[str, int],
    *,
    length: int,
    rows: int = 1,
    microbatches: int = 2,
    lora: dict[str, Any] | None = None,
    precision: str = "fp32",
    **how: Any,
) -> dict[str, Any]:
    """The second step on random rows of one length, every position trained on.

    Returns:
        peak bytes, what was sent, {(operation, ranks): bytes}, and this rank's place in the pipeline.
    """
    state = ready(
        path, layout, precision=precision, adapter=LoraConfig(**lora) if lora else None, from_scratch=True, **how
    )
    mesh = state.mesh
    assert mesh is not None
    vocabulary = state.model.config.vocab_size
    random = np.random.default_rng(mesh.data_rank)
    batches = [
        Batch.pack(
            [Sample.from_ids(random.integers(3, vocabulary, length + 1), np.ones(length + 1)) for _ in range(rows)]
        )
        for _ in range(microbatches)
    ]
    total = length * rows * microbatches * mesh.data_ranks
    batches = [batch.scaled(1 / total) for batch in batches]
    take(state, batches)  # the first step sets things up
    held: list[torch.Tensor] = [*state.model.parameters(), *state.model.buffers()]
    held += [s for states in state.optimizer.state.values() for s in states.values() if isinstance(s, torch.Tensor)]
    with Watch(held) as watch:
        take(state, batches)
    return {"peak": watch.peak, "sent": {key: sent for key, sent in watch.sent.items() if sent}, "stage": mesh.stage}


def take(state: TrainState, batches: list[Batch]) -> None:
    """One step, as the recipe takes it."""
    assert state.mesh is not None
    outputs = forward_backward_all(state, batches)
    loss = float(state.mesh.sum(torch.stack([output.loss for output in outputs]).sum()))
    optim_step(state, loss=loss, max_gradient_norm=None if state.in_backward is not None else 1.0)
