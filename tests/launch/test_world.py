"""What ranks do together, on two of them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from luthier.errors import ConfigError
from luthier.launch import (
    FIRST_STEP_TIMEOUT,
    GarbageCollection,
    Place,
    any_rank,
    join,
    keep_modules,
    restarted,
    set_timeout,
    unhurried,
)
from luthier.launch import garbage as garbage_module
from luthier.launch.world import own_device
from luthier.parallel.mesh import spare_group
from tests.world import World


def agree() -> list[int]:
    """On every rank: the largest of what each says."""
    return [any_rank(dist.get_rank() * 15), any_rank(dist.get_rank() == 1), any_rank()]


def test_ranks_agree_on_the_largest_value(world: Callable[[int], World]) -> None:
    assert world(2).run(agree) == [[15, 1, 0], [15, 1, 0]]


def give_up(seconds: float) -> list[str]:
    """On every rank: a collective that the other does not take part in, in the whole world and in a mesh's group."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))  # a group other than the world's
    store = dist.distributed_c10d._get_default_store()
    messages = []
    set_timeout(seconds)
    try:
        for number, group in enumerate((mesh.get_group("tp"), dist.group.WORLD)):
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError) as caught:
                    dist.all_reduce(torch.zeros(1), group=group)
                messages.append(str(caught.value))
                store.set(f"gave up {number}", "")
            else:
                store.wait([f"gave up {number}"], timedelta(seconds=100))
    finally:
        set_timeout(120.0)
    return messages


def test_the_time_out_holds_for_the_groups_of_meshes_too(world: Callable[[int], World]) -> None:
    messages, _ = world(2).run(give_up, 0.2)
    world(2).close()  # groups in which a collective was given up are of no more use
    assert len(messages) == 2
    assert all(re.search("Timed out waiting 200ms|Application timeout", message) for message in messages), messages


def patience(group: dist.ProcessGroup | None) -> float:
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def patiences() -> list[float]:
    """On every rank: how long the world waits, and the spare group."""
    spare = spare_group(timedelta(hours=2))
    found = []
    try:
        set_timeout(60.0)
        found += [patience(dist.group.WORLD), patience(spare)]
        with unhurried():
            found += [patience(dist.group.WORLD), patience(spare)]
        found += [patience(dist.group.WORLD), patience(spare)]
    finally:
        set_timeout(120.0)
    return found


def test_the_spare_group_keeps_its_patience(world: Callable[[int], World]) -> None:
    assert world(2).run(patiences) == [[60.0, 7200.0, FIRST_STEP_TIMEOUT, 7200.0, 60.0, 7200.0]] * 2


def test_a_process_of_its_own_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with join(torch.device("cpu")) as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()
        assert not restarted()
        assert any_rank(3) == 3
        with unhurried():
            set_timeout(1.0)


def test_a_single_rank_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Place(rank=0, ranks=1, local_rank=0, master=("localhost", 1))
    for name, value in alone.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with join(torch.device("cpu")):
        assert not dist.is_initialized()
        assert restarted()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with join(torch.device("cpu")):
        assert not restarted()


@pytest.mark.parametrize(
    ("asked", "seen", "local_ranks", "expected"),
    [("cpu", 0, 8, "cpu"), ("cuda", 8, 8, "cuda:5"), ("cuda", 8, None, "cuda:5"), ("cuda", 1, None, "cuda:0")],
)
def test_each_rank_takes_its_own_device(
    monkeypatch: pytest.MonkeyPatch, asked: str, seen: int, local_ranks: int | None, expected: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    here = Place(rank=13, ranks=16, local_rank=5, master=("h", 1), local_ranks=local_ranks)
    assert own_device(torch.device(asked), here) == torch.device(expected)


@pytest.mark.parametrize(
    ("asked", "seen", "sentence"),
    [
        ("cuda:1", 8, "train.device: cuda:1 is one device, and there are 16 ranks; write cuda and each takes its own"),
        (
            "cuda",
            4,
            "train.device: rank 13 is number 6 on a machine with 4 cuda devices; start 4 processes on a machine",
        ),
        (
            "cuda",
            1,
            "train.device: rank 13 is number 6 on a machine with one cuda device; start one process on a machine",
        ),
    ],
)
def test_ranks_without_a_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, seen: int, sentence: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    with pytest.raises(ConfigError) as caught:
        own_device(torch.device(asked), Place(rank=13, ranks=16, local_rank=5, master=("h", 1), local_ranks=8))
    assert str(caught.value) == sentence


class Ring:
    """Refers to itself, and counts those that are still there."""

    alive = 0

    def __init__(self) -> None:
        self.me: Any = self
        Ring.alive += 1

    def __del__(self) -> None:
        Ring.alive -= 1


@pytest.mark.parametrize("kept", [False, True])
def test_garbage_is_collected_at_given_steps_alone(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards what has been set aside for good is so still, and nothing else."""
    monkeypatch.setattr(garbage_module, "_kept", False)
    gc.unfreeze()
    gc.collect()
    if kept:
        keep_modules()
    with GarbageCollection(every=3) as garbage:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 100_000
        left = []
        for step in range(1, 8):
            Ring()
            garbage.step(step)
            left.append(Ring.alive)
        assert left == [1, 2, 0, 1, 2, 0, 1]
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 100_000) == kept
