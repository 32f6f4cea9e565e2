"""train.compile: layers compiled one by one, adapters in place, documents of any length; on layouts too."""

import functools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from tests.oracles.plain import gradient_error, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import measure, reference


def ready(path: Path, compiled: bool) -> TrainState:
    state = build_state(
        resolve(str(path)),
        adapter=LoraConfig(rank=4, target=["attn"]),
        optimizer=SGDConfig(name="sgd"),
        precision="fp32",
        device=torch.device("cpu"),
        compile_layers=compiled,
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in state.trainable.items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02, generator=generator)
    return state


def gradients(state: TrainState, lengths: list[int]) -> dict[str, torch.Tensor]:
    ids = np.random.default_rng(0)
    rows = [Sample.from_ids(ids.integers(4, 260, n + 1), np.ones(n + 1)) for n in lengths]
    batch = Batch.pack(rows)
    state.optimizer.zero_grad()
    forward_backward(state, batch.scaled(1 / batch.total_weight))
    return {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about themselves
def test_compiled_layers_give_the_same_gradients_at_every_length(tmp_path: Path) -> None:
    path = save_strong(debug_config("llama", num_hidden_layers=1), tmp_path / "llama")
    plain, compiled = ready(path, False), ready(path, True)
    for lengths in ([20, 3, 11], [40, 31]):
        assert gradient_error(gradients(compiled, lengths), gradients(plain, lengths)) < 2e-5


def compiled_on(path: Path, layout: dict[str, int], backend: str) -> dict[str, Any]:
    """What `measure` finds, and how many graphs were compiled."""
    torch._dynamo.reset()
    compile_by = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    with mock.patch.object(torch.nn.Module, "compile", compile_by), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor warn about themselves
        found = measure(path, layout, documents(), compile_layers=True)
    return found | {"graphs": counters["stats"]["unique_graphs"]}


# What inductor makes of a graph is tested above, and compiled layers on two ranks in tests/parallel.
@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", [{"pp": 2}, {"cp": 2}], ids=str)
def test_compiled_layers_on_a_layout(world: Any, tmp_path: Path, layout: dict[str, int], backend: str) -> None:
    path = save_strong(debug_config("llama"), tmp_path / "llama")
    expected = reference(path)
    together: dict[str, torch.Tensor] = {}
    for found in world(2).run(compiled_on, path, layout, backend):
        assert found["graphs"] > 0
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)  # its norms are fp32 inside
        assert found["validation"] == pytest.approx(expected.loss, rel=1e-6)
        together |= found["gradients"]
    assert gradient_error(together, expected.gradients) < 1e-5
