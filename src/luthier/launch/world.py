"""What ranks do together: join, agree, wait, collect garbage. torch is imported when there is a group."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from luthier.errors import ConfigError
from luthier.launch.place import Place, place, refuse_half
from luthier.launch.records import note_failure

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

FIRST_STEP_TIMEOUT = 3600.0
"""Seconds that a rank waits for others until the first step is done: one may read files, or compile, meanwhile."""
STEP_TIMEOUT = 600.0
"""Seconds from then on: ranks that work alike are never far apart, so a longer wait means that one hangs."""

LAUNCHER = "LUTHIER_LAUNCHER"
"""Set by our launcher: its process id."""
_PR_SET_PDEATHSIG = 1

_attempt = 0
_seconds = FIRST_STEP_TIMEOUT
"""What `set_timeout` said last."""
_patient: list[Any] = []
"""Groups with a patience of their own."""


def heed_launcher() -> None:
    """First thing in a rank of our launcher: end when it is gone, and leave a trace in the log when crashing."""
    faulthandler.enable()
    launcher = int(os.environ[LAUNCHER])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it went before we could ask to be told
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def join(device: torch.device) -> Iterator[torch.device]:
    """Be one of the ranks that the environment speaks of, for as long as the context lasts. All ranks.

    A process of its own, and a single rank, have no process group. Where there is a group already, it is used.

    Args:
        device: what the config asks for; "cuda" means the one that is this rank's.

    Yields:
        the device of this rank.

    Raises:
        ConfigError: the ranks of this machine cannot have a device each, or the environment says half of a place.
    """
    here = place(os.environ)
    if here is None and not _grouped():
        refuse_half(os.environ)
    if here is None or here.ranks == 1:
        _agree_on_attempt(here.attempt if here is not None else 0)
        yield device
        return
    import torch
    import torch.distributed as dist

    device = own_device(device, here)
    if dist.is_initialized():
        yield device
        return
    backends = dist.Backend.default_device_backend_map
    backend = backends["cpu"]
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"cpu:{backend},{device.type}:{backends[device.type]}"
    os.environ.update(here.variables())
    timeout = timedelta(seconds=FIRST_STEP_TIMEOUT)
    store, *_ = next(dist.rendezvous("env://", here.rank, here.ranks, timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        # torch's launcher keeps one store for all its attempts: without a prefix, ranks would find the addresses of
        # those that failed before.
        store=dist.PrefixStore(f"start {here.start}", store),
        rank=here.rank,
        world_size=here.ranks,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    try:
        _agree_on_attempt(any_rank(here.attempt))
        yield device
        set_timeout(FIRST_STEP_TIMEOUT)
        any_rank()  # the last to be done keeps the others: whoever leaves first takes the store along
    except BaseException:
        note_failure()
        if device.type == "cuda":
            # Waiting for work that others will never do would hang; this gives it up.
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def own_device(device: torch.device, here: Place) -> torch.device:
    """The device of this rank among those of its kind that it can see.

    Raises:
        ConfigError: one device is named for all, or there are fewer than ranks on this machine.
    """
    import torch

    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f"{device} is one device, and there are {here.ranks} ranks",
            where="train.device",
            remedy=f"write {device.type} and each takes its own",
        )
    devices = torch.accelerator.device_count()
    if devices == 1 and here.local_ranks is None:  # Slurm can show each rank its own device alone
        return torch.device(device.type, 0)
    if here.local_rank >= devices:
        seen = f"one {device.type} device" if devices == 1 else f"{devices} {device.type} devices"
        raise ConfigError(
            f"rank {here.rank} is number {here.local_rank + 1} on a machine with {seen}",
            where="train.device",
            remedy=f"start {'one process' if devices == 1 else f'{devices} processes'} on a machine",
        )
    return torch.device(device.type, here.local_rank)


def any_rank(value: int = 0) -> int:
    """The largest value that any rank gives. All ranks, at the same moment; one process gets its own back.

    `any_rank(number of the signal seen, else 0)` at the end of a step stops all ranks after the same one.
    """
    if not _grouped():
        return value
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id or torch.device("cpu")
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def _grouped() -> bool:
    """Whether this process is in a group, ours or an embedding program's."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def restarted() -> bool:
    """Whether these ranks were started before, and failed or changed in number: then they go on from a checkpoint,
    whatever was asked of the first ones. The same on all ranks, within `join`."""
    return _attempt > 0


def _agree_on_attempt(attempt: int) -> None:
    global _attempt
    _attempt = attempt  # a node that came later has not counted along


def set_timeout(seconds: float) -> None:
    """How long collectives wait from now on, in every group that this rank is in, those of meshes too; groups of
    `patient_group` keep their own patience."""
    global _seconds
    _seconds = seconds
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    groups = dist.distributed_c10d._world.pg_map
    _patient[:] = [group for group in _patient if group in groups]
    for group in groups:
        if group not in _patient:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def patient_group(patience: timedelta) -> dist.ProcessGroup:
    """A new group of all ranks, on gloo, that waits for as long whatever `set_timeout` says. All ranks call it."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=patience)
    _patient.append(group)
    return group


@contextmanager
def unhurried() -> Iterator[None]:
    """Within, ranks wait for each other as long as before the first step, then as before: one may write an export
    alone, or sample longer answers than others. All ranks."""
    before = _seconds
    set_timeout(FIRST_STEP_TIMEOUT)
    try:
        yield
    finally:
        set_timeout(before)
