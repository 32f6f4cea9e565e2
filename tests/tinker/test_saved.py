"""Oracle: a loop that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.errors import CheckpointError, UserError
from luthier.tinker import AdamParams, LocalTrainingClient, LoraConfig, apply_lora, saved
from tests.adapters.models import PEFT_WARNINGS, tiny
from tests.tinker.models import make_data

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")]


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
    assert Path(path) == tmp_path / "weights" / "second"
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
    (tmp_path / "weights" / "a" / "own.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="it is there already; overwrite=True replaces it"):
        client.save_state("a").result()
    train(client, range(1))
    client.save_state("a", overwrite=True).result()
    assert not (tmp_path / "weights" / "a" / "own.txt").exists()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["a"]
    again = fresh(directory=tmp_path)
    again.load_state(tmp_path / "weights" / "a").result()
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": None}, "name: None is no name"),
        ({"name": "a\0b"}, "name: 'a.x00b' cannot be a directory's name"),
        ({"name": "\ud83d"}, "name: .* cannot be a directory's name"),
        ({"name": "ü" * 128}, "name: .* cannot be a directory's name"),
        ({"name": "/dev/null/a"}, "/dev/null/a: there can be no directory of this name"),
        ({"name": "a", "ttl_seconds": "5"}, "ttl_seconds: '5' is no number of seconds"),
        ({"name": "a", "user_metadata": ["a"]}, "user_metadata: it is no mapping of text to text"),
        ({"name": "a", "user_metadata": {"a": {1}}}, "user_metadata: it is no mapping of text to text"),
    ],
)
def test_names_and_notes_that_cannot_be_kept_leave_nothing_behind(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    client = fresh(directory=tmp_path)
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(UserError, match=told):
            save(**given).result()
    assert not list(tmp_path.rglob("*"))


@torch.no_grad()
def test_weights_for_sampling_are_pefts_files_and_read_over_the_same_base_alone(tmp_path: Path) -> None:
    """Oracle: PEFT opens them; ours gives the logits of the model in training, which stays as it is."""
    import peft

    client, ids = fresh(), torch.arange(3, 12)[None]
    with torch.enable_grad():
        train(client, range(1))
    before = weights(client)
    saved.save_for_sampler(client.state, tmp_path / "a", user_metadata={"note": "mine"})
    exact = client.model(input_ids=ids, use_cache=False).logits
    ours = saved.load_for_sampler(client.model, tmp_path / "a")
    assert torch.equal(ours(input_ids=ids, use_cache=False).logits, exact)
    assert ours.transformer.wte.weight is client.model.transformer.wte.weight
    theirs = peft.PeftModel.from_pretrained(tiny("gpt2", torch.float32), tmp_path / "a")
    assert torch.allclose(theirs(input_ids=ids, use_cache=False).logits, exact, atol=1e-5)
    with torch.enable_grad():
        train(client, range(1, 2))
    assert torch.equal(ours(input_ids=ids, use_cache=False).logits, exact)
    assert not same(weights(client), before)
    assert '"user_metadata.note": "mine"' in (tmp_path / "a" / "luthier_export.json").read_text()
    with pytest.raises(CheckpointError, match="it is there already; choose another name"):
        saved.save_for_sampler(client.state, tmp_path / "a")
    with pytest.raises(CheckpointError, match="base model was"):
        saved.load_for_sampler(fresh("gpt2-untied").model, tmp_path / "a")
    with pytest.raises(CheckpointError, match="it holds no weights for sampling"):
        saved.load_for_sampler(client.model, tmp_path)


@torch.no_grad()
def test_weights_for_sampling_of_a_model_that_trains_whole_are_the_whole_model(tmp_path: Path) -> None:
    client, ids = LocalTrainingClient(tiny("llama", torch.float32)), torch.arange(3, 12)[None]
    saved.save_for_sampler(client.state, tmp_path / "a")
    whole = saved.load_for_sampler(client.model, tmp_path / "a")
    assert torch.equal(
        whole(input_ids=ids, use_cache=False).logits, client.model(input_ids=ids, use_cache=False).logits
    )


def test_a_state_survives_a_death_between_taking_it_away_and_putting_the_new_one_there(tmp_path: Path) -> None:
    client = fresh(directory=tmp_path)
    train(client, range(1))
    path = Path(client.save_state("kept").result().path)
    expected = weights(client)
    path.rename(path.with_name(f".{path.name}.doomed"))  # as far as the process came
    train(client, range(1, 2))
    client.load_state(path).result()
    assert same(weights(client), expected)
