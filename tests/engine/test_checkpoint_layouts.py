"""A checkpoint of any layout resumes on any other: weights, moments, counts and the digest are the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from luthier.config import LoraConfig
from luthier.config.sections import AdamWConfig
from luthier.engine import randomness
from luthier.engine.build import build_state
from luthier.engine.checkpoint import Checkpointer, committed, random_states
from luthier.engine.identity import model_digest
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from tests.oracles.plain import save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches, ready, strengthen, whole

OPTIMIZER = AdamWConfig(learning_rate=0.01)
LORA = LoraConfig(rank=4, target=["attn", "mlp"])
Everything = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = {"qwen3": {}, "llama": {"tie_word_embeddings": True}, "mixtral": {}, "phi3": {}}
    return {kind: save_strong(debug_config(kind, **changes), root / kind) for kind, changes in kinds.items()}


def everything(state: TrainState) -> Everything:
    """Copies of all that a checkpoint holds of this rank's stage, whole; and the digest, of the whole model."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    found: Everything = {name: whole(parameter.detach()).clone() for parameter, name in names.items()}
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            found[f"{names[parameter]} {key}"] = whole(value).clone() if isinstance(value, torch.Tensor) else value
    found["digest"] = model_digest(state.model, dist.group.WORLD if state.mesh is not None else None)
    found["step"] = state.counters.step
    return found


def step(state: TrainState) -> float:
    assert state.mesh is not None
    batches = microbatches(documents(), state.mesh.data_rank, state.mesh.data_ranks)
    loss = float(state.mesh.sum(torch.stack([output.loss for output in forward_backward_all(state, batches)]).sum()))
    optim_step(state, loss=loss)
    return loss


def taken(
    model: Path, layout: dict[str, int], directory: Path, lora: LoraConfig | None, *, asynchronous: bool
) -> tuple[Everything, float]:
    """Two steps on a layout, a checkpoint, and the loss of a third step, taken while it is being written."""
    state = ready(model, layout, precision="fp32", adapter=lora, optimizer=OPTIMIZER)
    if lora is not None:
        strengthen(state)
    step(state), step(state)
    randomness.seed_everything(dist.get_rank())
    torch.rand(3)
    writer = Checkpointer(directory, trainable_only=lora is not None, asynchronous=asynchronous)
    held = everything(state)
    writer.save(state, {"note": "kept"})
    loss = step(state)
    writer.wait()
    return held, loss


def resumed(
    model: Path, layout: dict[str, int], directory: Path, lora: LoraConfig | None
) -> tuple[Everything, float, list[float] | None]:
    """What another model on another layout is after reading the checkpoint, its next loss, and its next draws."""
    randomness.seed_everything(17)
    state = ready(model, layout, precision="fp32", adapter=lora, optimizer=OPTIMIZER)
    [checkpoint] = committed(directory)
    assert Checkpointer(directory, trainable_only=lora is not None).load(state, checkpoint)["note"] == "kept"
    draws = torch.rand(3).tolist() if random_states(checkpoint, state.mesh) is not None else None
    return everything(state), step(state), draws


def alone(model: Path, directory: Path, lora: LoraConfig | None) -> Everything:
    """The same in one process."""
    state = build_state(
        resolve(str(model)), adapter=lora, optimizer=OPTIMIZER, precision="fp32", device=torch.device("cpu")
    )
    [checkpoint] = committed(directory)
    Checkpointer(directory, trainable_only=lora is not None).load(state, checkpoint)
    assert random_states(checkpoint, None) is None
    return everything(state)


def check(expected: Everything, found: list[Everything], layout: Any) -> None:
    """Every rank holds a part of the whole, and all together hold all of it."""
    held: set[str] = set()
    for other in found:
        held |= other.keys()
        for key, value in other.items():
            same = torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key]
            assert same, f"{key} on {layout}"
    assert held == expected.keys()


def union(results: list[Everything]) -> Everything:
    """What the stages hold together; what several hold, they hold alike."""
    found: Everything = {}
    for result in results:
        for key, value in result.items():
            if isinstance(value, torch.Tensor) and key in found:
                assert torch.equal(value, found[key]), key
            found[key] = value
    return found


FSDP, TP_FSDP, PP_FSDP = {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}
CASES = [
    ("qwen3", None, 4, FSDP, [TP_FSDP, PP_FSDP, {"dp_replicate": 2, "dp_shard": 2}, {"cp": 2, "dp_shard": 2}]),
    ("llama", None, 4, PP_FSDP, [FSDP, {"pp": 2, "tp": 2, "dp_shard": 1}]),
    ("llama", LORA, 4, PP_FSDP, [TP_FSDP]),
    ("phi3", LORA, 4, TP_FSDP, [FSDP]),
    ("mixtral", None, 4, {"ep": 2, "dp_shard": 4}, [TP_FSDP, {"pp": 2, "ep": 2, "dp_shard": 2}]),
    ("phi3", None, 2, {"tp": 2}, [{"dp_shard": 2}]),
    ("qwen3", LORA, 2, {"dp_shard": 2}, [{"pp": 2}, {"tp": 2}]),
]


@pytest.mark.parametrize(("kind", "lora", "ranks", "layout", "others"), CASES)
def test_layouts_resume_one_another(
    world: Any,
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    lora: LoraConfig | None,
    ranks: int,
    layout: dict[str, int],
    others: list[dict[str, int]],
) -> None:
    asynchronous = "pp" in layout or "tp" in layout
    results = world(ranks).run(taken, models[kind], layout, tmp_path, lora, asynchronous=asynchronous)
    expected, losses = union([held for held, _ in results]), {loss for _, loss in results}
    assert len(losses) == 1
    draws = []
    for rank in range(ranks):
        randomness.seed_everything(rank)
        torch.rand(3)
        draws.append(torch.rand(3).tolist())
    again = world(ranks).run(resumed, models[kind], layout, tmp_path, lora)
    check(expected, [held for held, _, _ in again], layout)
    assert {loss for _, loss, _ in again} == losses, "on the same layout to the bit"
    assert [drawn for _, _, drawn in again] == draws
    for other in others:
        found = world(ranks).run(resumed, models[kind], other, tmp_path, lora)
        check(expected, [held for held, _, _ in found], other)
        assert found[0][1] == pytest.approx(results[0][1], rel=2e-5)
        assert all(drawn is None for _, _, drawn in found), "random states are of other ranks"
    check(expected, [alone(models[kind], tmp_path, lora)], "one process")
    files = list((committed(tmp_path)[-1] / "tensors").glob("*.safetensors"))
    assert len(files) == ranks, "every rank has written"
    size = sum(file.stat().st_size for file in files)
    stored = {key: v for key, v in expected.items() if isinstance(v, torch.Tensor)}
    if lora is None:
        assert size < 1.2 * sum(value.nbytes for value in stored.values()), "nothing twice"
