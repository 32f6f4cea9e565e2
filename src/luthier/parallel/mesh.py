"""Degrees to ranks and groups. Nobody else does this sum: who needs a group asks the mesh.

Ranks are numbered with the outermost degree first: pp, dp_replicate, dp_shard, cp, tp. So tensor-parallel ranks, which
talk most, are neighbours. Experts look at the same ranks as pp, dp_replicate, efsdp, ep.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
        kind, size = device.type, layout
        dense = init_device_mesh(
            kind,
            (size.pp, size.dp_replicate, size.fsdp, size.tp),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        self.tp = dense["tp"] if size.tp > 1 else None
        self.pp = dense["pp"] if size.pp > 1 else None
        self.fsdp = _sharding(dense, size.dp_replicate, size.fsdp, "fsdp")
        self.ep = self.efsdp = None
        rows = init_device_mesh(
            kind, (size.pp, size.data_ranks, size.cp, size.tp), mesh_dim_names=("pp", "data", "cp", "tp")
        )
        self.cp = rows["cp"] if size.cp > 1 else None
        self._data = rows["data"]
        if size.ep > 1:
            names = ("pp", "dp_replicate", "efsdp", "ep")
            experts = init_device_mesh(kind, (size.pp, size.dp_replicate, size.efsdp, size.ep), mesh_dim_names=names)
            self.ep = experts["ep"]
            # Of one rank too: it tells FSDP that these weights are none of the other mesh's.
            self.efsdp = _sharding(experts, size.dp_replicate, size.efsdp, "efsdp") or experts["efsdp"]
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
        dist.all_reduce(total, group=self._data.get_group())
        return total

    @property
    def part(self) -> int:
        """Which part of the rows' positions this rank computes; ranks of tp and pp compute the same one."""
        return self.data_rank * self.layout.cp + (self.cp.get_local_rank() if self.cp is not None else 0)

    def wait(self) -> None:
        """Return when all ranks have come here."""
        dist.barrier()


def _sharding(mesh: DeviceMesh, replicas: int, shards: int, name: str) -> DeviceMesh | None:
    if replicas > 1:
        return mesh["dp_replicate", name]
    return mesh[name] if shards > 1 else None
