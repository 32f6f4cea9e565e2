"""What ranks that write something together say to one another: facts, and whether all went well.

Everywhere `group` is the group of all ranks that hold parts of the model, and None where one process holds it whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from luthier.errors import UserError

Group = dist.ProcessGroup


def rank_in(group: Group | None) -> int:
    """This process's place in the group; 0 without one. Rank 0 makes, names and removes directories."""
    return 0 if group is None else dist.get_rank(group)


def global_rank(group: Group | None, rank: int) -> int:
    """The number that a rank of the group has among all processes."""
    return rank if group is None else dist.get_global_rank(group, rank)


def exchange(value: Any, group: Group | None) -> list[Any]:
    """What every rank gives, by rank; all ranks call it."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def tell(value: Any, group: Group | None, source: int = 0) -> Any:
    """What rank `source` of the group gives, on every rank; all ranks call it."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def told_once(value: Any, group: Group | None) -> list[tuple[list[int], Any]]:
    """What all ranks give, equal things once, with the ranks that gave them: so stages of a pipeline are told apart.

    Args:
        value: equal ones have the same `repr`, and others another.
        group: all of whose ranks call this.

    Returns:
        [(ranks, value)], the value of the lowest rank first.
    """
    givers: dict[str, list[int]] = {}
    for rank, mark in enumerate(exchange(hashlib.sha256(repr(value).encode()).hexdigest(), group)):
        givers.setdefault(mark, []).append(rank)
    return [(ranks, tell(value, group, source=ranks[0])) for ranks in givers.values()]


@contextmanager
def together(group: Group | None) -> Iterator[None]:
    """A block after which every rank raises what went wrong on one; all ranks enter it.

    Inside it a rank that fails must not leave others waiting for it.

    Raises:
        Exception: what was raised here; elsewhere the same sentence, or which rank failed and how.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if group is None:
            raise
        failure = error
    if group is None:
        return
    said = failure if failure is None or isinstance(failure, UserError) else f"{type(failure).__name__}: {failure}"
    found = exchange(said, group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(found):
        if isinstance(other, UserError):
            raise other
        if other is not None:
            raise RuntimeError(f"rank {rank} failed: {other}")
