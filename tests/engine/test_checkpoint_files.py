"""Commit by rename, pruning, and exact round trips of what a checkpoint holds."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from luthier.config.sections import AdamWConfig, SGDConfig
from luthier.engine import randomness
from luthier.engine.checkpoint import Checkpointer, check_unchanged, committed
from luthier.engine.state import TrainState
from luthier.errors import CheckpointError
from luthier.hf.source import resolve
from luthier.hf.tensor_file import TensorFile
from luthier.optim.build import build_optimizer


def small_state(seed: int, dtype: torch.dtype = torch.float32) -> TrainState:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), AdamWConfig(learning_rate=0.1))
    return TrainState(
        model=model, optimizer=optimizer, head=None, device=torch.device("cpu"), source=resolve("debug:llama")
    )  # type: ignore[arg-type]


def take_steps(state: TrainState, count: int) -> None:
    for _ in range(count):
        state.model(torch.randn(5, 4)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.counters.step += 1
        state.counters.tokens += 5


def everything(state: TrainState) -> dict[str, Any]:
    moments = [torch.as_tensor(values[key]) for values in state.optimizer.state.values() for key in sorted(values)]
    return {"weights": [p.detach().clone() for p in state.model.parameters()], "moments": moments}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("trainable_only", [True, False])
def test_a_resumed_run_ends_bit_equal_to_an_unbroken_one(
    tmp_path: Path, asynchronous: bool, trainable_only: bool
) -> None:
    randomness.seed_everything(3)
    whole = small_state(1)
    take_steps(whole, 6)

    randomness.seed_everything(3)
    first = small_state(1)
    take_steps(first, 3)
    writer = Checkpointer(tmp_path, asynchronous=asynchronous, trainable_only=trainable_only)
    writer.save(first, {"loader": {"row": 15}})
    take_steps(first, 2)  # goes on while the checkpoint is being written: must not leak into it
    writer.wait()

    randomness.seed_everything(99)
    second = small_state(1 if trainable_only else 2)
    reader = Checkpointer(tmp_path, trainable_only=trainable_only)
    latest = reader.latest()
    assert latest is not None
    assert latest.name == "step-000003"
    record = reader.load(second, latest)
    assert record["loader"] == {"row": 15}
    assert second.counters.step == 3
    assert second.counters.tokens == 15
    take_steps(second, 3)
    for key, values in everything(whole).items():
        for expected, seen in zip(values, everything(second)[key], strict=True):
            assert torch.equal(expected, seen), key


def test_moments_keep_their_dtype_beside_bf16_weights(tmp_path: Path) -> None:
    randomness.seed_everything(1)
    first = small_state(1, torch.bfloat16)
    for _ in range(3):
        first.model(torch.randn(5, 4, dtype=torch.bfloat16)).square().mean().backward()
        first.optimizer.step()
    writer = Checkpointer(tmp_path)
    writer.save(first, {})
    writer.wait()
    second = small_state(2, torch.bfloat16)
    Checkpointer(tmp_path).load(second, tmp_path / "step-000000")
    seen, expected = (state.optimizer.state[state.model[0].bias] for state in (second, first))
    assert seen["exp_avg"].dtype == torch.float32
    assert torch.equal(seen["exp_avg"], expected["exp_avg"])
    assert seen["step"] == expected["step"] == 3


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    state = small_state(1)
    writer = Checkpointer(tmp_path, keep=2, asynchronous=False)
    for score in [3.0, 1.0, 2.0, 4.0, 5.0]:
        take_steps(state, 1)
        writer.save(state, {}, score=score)
    assert [path.name for path in committed(tmp_path)] == ["step-000002", "step-000004", "step-000005"]


def test_scores_of_other_rows_do_not_compare(tmp_path: Path) -> None:
    state = small_state(1)
    writer = Checkpointer(tmp_path, keep=1, asynchronous=False)
    for score, of in [(1.0, "a"), (None, None), (3.0, "b"), (4.0, "b")]:
        take_steps(state, 1)
        writer.save(state, {}, score=score, score_of=of)
        if score is None:  # what was best stays so for as long as nothing newer is measured
            assert [path.name for path in committed(tmp_path)] == ["step-000001", "step-000002"]
    assert [path.name for path in committed(tmp_path)] == ["step-000003", "step-000004"]


def test_half_written_checkpoints_are_never_taken(tmp_path: Path) -> None:
    state = small_state(1)
    writer = Checkpointer(tmp_path, asynchronous=False)
    take_steps(state, 1)
    writer.save(state, {})
    (tmp_path / ".writing-step-000009").mkdir()
    (tmp_path / "step-000010.tmp").mkdir()
    again = Checkpointer(tmp_path)
    latest = again.latest()
    assert latest is not None
    assert latest.name == "step-000001"
    # Whoever only reads (an export beside a run) leaves alone what a run may be writing this very moment.
    assert (tmp_path / ".writing-step-000009").exists()
    again.tidy()
    assert not (tmp_path / ".writing-step-000009").exists()


def test_states_of_another_dtype_are_refused_and_not_cast(tmp_path: Path) -> None:
    state = small_state(1)
    Checkpointer(tmp_path, asynchronous=False).save(state, {})
    other = small_state(1)
    bias = other.model[0].bias
    other.optimizer.state[bias]["exp_avg"] = other.optimizer.state[bias]["exp_avg"].bfloat16()
    with pytest.raises(CheckpointError, match=r"optimizer\.0\.bias\.exp_avg is torch\.float32"):
        Checkpointer(tmp_path).load(other, tmp_path / "step-000000")


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    state = small_state(1)
    Checkpointer(tmp_path, asynchronous=False).save(state, {})
    other = TrainState(
        model=nn.Sequential(nn.Linear(4, 8)),
        optimizer=build_optimizer([("w", nn.Parameter(torch.zeros(1)))], SGDConfig(name="sgd")),
        head=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        source=resolve("debug:llama"),
    )
    with pytest.raises(CheckpointError, match=r"other parameters \(for instance model\.2"):
        Checkpointer(tmp_path).load(other, tmp_path / "step-000000")


def test_damage_is_named(tmp_path: Path) -> None:
    state = small_state(1)
    Checkpointer(tmp_path, asynchronous=False).save(state, {})
    [tensors] = (tmp_path / "step-000000" / "tensors").glob("*.safetensors")
    whole = tensors.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 1  # one bit of one number
    tensors.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: its bytes are not those that were written; "):
        Checkpointer(tmp_path).load(small_state(1), tmp_path / "step-000000")
    tensors.write_bytes(whole)
    Checkpointer(tmp_path).load(small_state(1), tmp_path / "step-000000")
    tensors.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match="step-000000"):
        Checkpointer(tmp_path).load(small_state(1), tmp_path / "step-000000")
    (tmp_path / "step-000000" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpointer(tmp_path).load(small_state(1), tmp_path / "step-000000")


def test_a_write_that_fails_is_told(tmp_path: Path) -> None:
    writer = Checkpointer(tmp_path, asynchronous=True)
    # A file where the tensors' directory should be: what a full or broken disk does, without filling one.
    state = small_state(1)
    original = Path.mkdir

    def mkdir_with_obstacle(self: Path, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.name.startswith(".writing-"):
            (self / "tensors").write_text("in the way")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir_with_obstacle)
        writer.save(state, {})
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.wait()
    assert writer.latest() is None


def test_what_changed_is_said() -> None:
    with pytest.raises(CheckpointError, match=r"data was 'a1' and is 'b2', train.rows_per_step was 8 and is 16"):
        check_unchanged(
            {"data": "a1", "train.rows_per_step": 8, "seed": 1},
            {"data": "b2", "train.rows_per_step": 16, "seed": 1},
            Path("step-000001"),
        )


def test_random_states_survive_json() -> None:
    randomness.seed_everything(11)
    random.gauss(0, 1), np.random.randn(3), torch.randn(5)
    taken = json.loads(json.dumps(randomness.capture()))
    expected = (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(4).tolist())
    randomness.seed_everything(12)
    randomness.restore(taken)
    assert expected == (random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(4).tolist())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFile, "write", full)
    writer = Checkpointer(tmp_path, asynchronous=asynchronous)

    def save() -> None:
        writer.save(small_state(1), {})
        writer.wait()

    with pytest.raises(CheckpointError) as caught:
        save()
    assert str(caught.value) == (
        f"{tmp_path}: the checkpoint could not be written ([Errno 28] No space left on device); "
        "free some space or choose another output"
    )
    assert committed(tmp_path) == []
