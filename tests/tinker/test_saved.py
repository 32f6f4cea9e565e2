"""Oracle: a loop that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luthier.errors import CheckpointError, UserError
from luthier.tinker import AdamParams, LocalTrainingClient, LoraConfig, apply_lora
from tests.adapters.models import tiny
from tests.tinker.models import make_data


def fresh(kind: str = "gpt2", rank: int = 4, directory: Path | None = None) -> LocalTrainingClient:
    model = tiny(kind, torch.float32)
    apply_lora(model, LoraConfig(rank=rank, train_unembed=False))
    return LocalTrainingClient(model, directory=directory or "tinker")


def train(client: LocalTrainingClient, steps: range) -> None:
    for step in steps:
        client.forward_backward(make_data(step, weights="weights"))
        client.optim_step(AdamParams(learning_rate=1e-2)).result()


def weights(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in client.state.trainable.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_states_go_on_bit_for_bit_and_weights_alone_begin_anew(tmp_path: Path) -> None:
    unbroken = fresh(directory=tmp_path)
    train(unbroken, range(2))
    path = unbroken.save_state("second", ttl_seconds=60).result().path
    assert Path(path) == tmp_path / "second"
    stored = weights(unbroken)
    size = sum(file.stat().st_size for file in Path(path).rglob("*.safetensors"))
    assert size < 4 * 4 * sum(p.numel() for p in unbroken.state.trainable.values())  # no frozen weight is in it
    train(unbroken, range(2, 4))

    resumed = fresh(directory=tmp_path)
    resumed.forward_backward(make_data(9))  # dropped by the load
    resumed.load_state_with_optimizer(path).result()
    assert same(weights(resumed), stored)
    train(resumed, range(2, 4))
    assert same(weights(resumed), weights(unbroken))

    renewed, other = fresh(directory=tmp_path), fresh(directory=tmp_path)
    train(renewed, range(5, 6))  # moments that must go
    renewed.load_state("second").result()
    assert same(weights(renewed), stored)
    other.model.load_state_dict(stored, strict=False)
    for client in (renewed, other):
        train(client, range(2, 4))
    assert same(weights(renewed), weights(other))
    assert not same(weights(renewed), weights(unbroken))


def test_what_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    client = fresh(directory=tmp_path)
    client.save_state("a").result()
    (tmp_path / "a" / "own.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="it is there already; overwrite=True replaces it"):
        client.save_state("a").result()
    train(client, range(1))
    client.save_state("a", overwrite=True).result()
    assert not (tmp_path / "a" / "own.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    again = fresh(directory=tmp_path)
    again.load_state(tmp_path / "a").result()
    assert same(weights(again), weights(client))


def test_states_of_something_else_are_refused(tmp_path: Path) -> None:
    path = fresh(directory=tmp_path).save_state("a").result().path
    for other, told in ((fresh(rank=2), "adapters was"), (fresh("gpt2-untied"), "model was")):
        with pytest.raises(CheckpointError, match=told):
            other.load_state(path).result()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        fresh().load_state(tmp_path / "b").result()
    with pytest.raises(UserError, match="ttl_seconds: 0 is no number of seconds above 0"):
        fresh().save_state("x", ttl_seconds=0).result()
