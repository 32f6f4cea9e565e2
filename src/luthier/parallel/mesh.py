"""Degrees to ranks and groups. Nobody else does this sum: who needs a group asks the mesh.

Ranks are numbered with the outermost degree first: pp, dp_replicate, dp_shard, cp, tp. So tensor-parallel ranks, which
talk most, are neighbours. Experts look at the same ranks as pp, dp_replicate, efsdp, ep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from luthier.launch import patient_group
from luthier.parallel.layout import Layout


class Mesh:
    """The groups that this process is in. One object a run, made when torch.distributed is.

    Args:
        layout: for exactly as many ranks as there are.
        device: of this rank.

    Attributes:
        fsdp: dp_shard x cp ranks, ("fsdp",), or with replicas ("dp_replicate", "fsdp"); None where both are 1.
        efsdp: the same for the weights of experts, of one rank too; None without ep.
        tp, cp, pp, ep: one-dimensional; None where the degree is 1.
        data_rank: which part of each global batch this rank reads; ranks of tp, cp and pp read the same.
        stage: which of the pipeline's ranks this is, 0 without one.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        assert dist.get_world_size() == layout.ranks, f"{layout} on {dist.get_world_size()} ranks"
        self.layout, self.device = layout, device
        self.rank = dist.get_rank()
        size = layout
        copies = {"dp_replicate": size.dp_replicate}
        # FSDP takes two dimensions where there are copies, be it that each is one rank's.
        whole = ("fsdp",) if size.dp_replicate > 1 else ()
        dense = _mesh(device.type, {"pp": size.pp, **copies, "fsdp": size.fsdp, "tp": size.tp}, whole)
        self.tp, self.pp = _along(dense, "tp"), _along(dense, "pp")
        self.fsdp = _along(dense, "dp_replicate", "fsdp")
        rows = _mesh(device.type, {"pp": size.pp, "data": size.data_ranks, "cp": size.cp, "tp": size.tp})
        self.cp, self._data = _along(rows, "cp"), _along(rows, "data")
        self.ep = self.efsdp = None
        if size.ep > 1:
            # efsdp of one rank too: it tells FSDP that these weights are none of the other mesh's.
            sharded = {"pp": size.pp, **copies, "efsdp": size.efsdp, "ep": size.ep}
            experts = _mesh(device.type, sharded, ("efsdp",))
            self.ep, self.efsdp = _along(experts, "ep"), _along(experts, "dp_replicate", "efsdp")
        within = self.rank % (size.ranks // size.pp)  # place in the stage
        self.data_rank = within // (size.cp * size.tp)
        self.data_ranks = size.data_ranks
        self.stage, self.stages = self.rank // (size.ranks // size.pp), size.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold a part of the same stage."""
        return self.layout.ranks // self.layout.pp

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the data ranks, of what the ranks that share the same rows (tp, cp, pp) all know. All ranks call it.

        Args:
            value: any shape, on the mesh's device; not changed.
        """
        total = value.detach().clone()
        if self._data is not None:
            dist.all_reduce(total, group=self._data.get_group())
        return total

    @property
    def part(self) -> int:
        """Which part of the rows' positions this rank computes; ranks of tp and pp compute the same one."""
        return self.data_rank * self.layout.cp + (self.cp.get_local_rank() if self.cp is not None else 0)

    def wait(self) -> None:
        """Return when all ranks have come here."""
        dist.barrier()


def spare_group(patience: timedelta) -> dist.ProcessGroup:
    """A second group of all ranks, on gloo, for what goes on beside training. One thing at a time: all who ask get the
    same. All ranks call it.

    Args:
        patience: how long ranks wait for each other, whatever holds for training's own groups.
    """
    return cast(dist.ProcessGroup, _once(("spare",), lambda: patient_group(patience)))


def _mesh(kind: str, degrees: dict[str, int], always: Sequence[str] = ()) -> DeviceMesh | None:
    """The world's ranks in as many dimensions as there are degrees above 1, or to be there always; all ranks call it.
    None for a single rank."""
    there = {name: degree for name, degree in degrees.items() if degree > 1 or name in always}
    if not there:
        return None
    names, shape = tuple(there), tuple(there.values())
    return cast(DeviceMesh, _once((kind, names, shape), lambda: init_device_mesh(kind, shape, mesh_dim_names=names)))


_made: dict[Any, Any] = {}


def _once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What was made for a key in this process group, or is now.

    A group's threads, which never quite rest, and on a GPU its memory, are there for as long as the process group is:
    runs that follow one another use the same.
    """
    world = dist.group.WORLD
    if _made.get("world") is not world:
        _made.clear()
        _made["world"] = world
    if key not in _made:
        _made[key] = make()
    return _made[key]


def _along(mesh: DeviceMesh | None, *names: str) -> DeviceMesh | None:
    """The part of a mesh in the dimensions of these names that it has; None where it has none of them."""
    there = tuple(name for name in names if mesh is not None and name in (mesh.mesh_dim_names or ()))
    return mesh[there] if mesh is not None and there else None
