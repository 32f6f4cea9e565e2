"""Groups of ranks: which, and that runs which follow one another share them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh
from tests.world import World


def made(layout: Layout) -> dict[str, Any]:
    mesh = Mesh(layout, torch.device("cpu"))
    parts = {name: getattr(mesh, name) for name in ("fsdp", "efsdp", "tp", "cp", "pp", "ep")}
    return {
        "ranks": {
            name: [dist.get_process_group_ranks(part.get_group(index)) for index in range(part.ndim)]
            for name, part in parts.items()
            if part is not None
        },
        "sum": float(mesh.sum(torch.tensor(float(mesh.rank)))),
        "threads": len(os.listdir("/proc/self/task")),
    }


def test_each_degree_has_its_ranks(world: Callable[[int], World]) -> None:
    first, second, third, _ = world(4).run(made, Layout(dp_shard=2, tp=2))
    assert first["ranks"] == {"fsdp": [[0, 2]], "tp": [[0, 1]]}
    assert second["ranks"] == {"fsdp": [[1, 3]], "tp": [[0, 1]]}
    assert third["ranks"] == {"fsdp": [[0, 2]], "tp": [[2, 3]]}
    assert (first["sum"], second["sum"]) == (0 + 2, 1 + 3)
    first, *_ = world(4).run(made, Layout(dp_replicate=4))
    assert first["ranks"] == {"fsdp": [[0, 1, 2, 3], [0]]}
    first, *_ = world(4).run(made, Layout(dp_shard=4, ep=4))
    assert first["ranks"] == {"fsdp": [[0, 1, 2, 3]], "efsdp": [[0]], "ep": [[0, 1, 2, 3]]}
    first, *_ = world(4).run(made, Layout(cp=2, pp=2))
    assert first["ranks"] == {"fsdp": [[0, 1]], "cp": [[0, 1]], "pp": [[0, 2]]}
    assert first["sum"] == 0


def test_runs_that_follow_one_another_share_their_groups(world: Callable[[int], World]) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, ep=2)
    before = [rank["threads"] for rank in world(4).run(made, layout)]
    assert [rank["threads"] for rank in world(4).run(made, layout)] == before
