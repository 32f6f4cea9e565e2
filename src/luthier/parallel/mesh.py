"""Degrees to ranks and groups. Nobody else does this sum: who needs a group asks the mesh.

Ranks are numbered with the outermost degree first: pp, dp_replicate, dp_shard, cp, tp. So tensor-parallel ranks, which
talk most, are neighbours. Experts look at the same ranks as pp, dp_replicate, efsdp, ep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from luthier.config.sections import ParallelConfig
from luthier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Resolved degrees, all at least 1."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Parts that each global batch is dealt into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that a weight is sharded over: those of context parallelism hold shards too."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that an expert's weight is sharded over, once the experts are dealt to the ranks of ep."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @staticmethod
    def resolve(config: ParallelConfig, ranks: int) -> Layout:
        """The layout of a config on some processes.

        Args:
            config: its degrees; one of them may be -1, and dp_shard's default of -1 gives way to another.
            ranks: processes there are.

        Raises:
            ConfigError: the degrees do not multiply to the ranks.
        """
        degrees = {field.name: int(getattr(config, field.name)) for field in fields(Layout)}
        open_ones = [name for name, degree in degrees.items() if degree == -1]
        if len(open_ones) > 1 and "dp_shard" in open_ones and "dp_shard" not in config.model_fields_set:
            degrees["dp_shard"] = 1
            open_ones.remove("dp_shard")
        if len(open_ones) > 1:
            raise ConfigError(f"{' and '.join(open_ones)} are both -1", where="parallel", remedy="give one a number")
        if open_ones == ["ep"]:
            degrees["ep"] = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        elif open_ones:
            rest = math.prod(degree for name, degree in degrees.items() if degree > 0 and name != "ep")
            if ranks % rest:
                raise ConfigError(
                    f"{_said(degrees)} takes a multiple of {rest} processes, and there {_are(ranks)}",
                    where="parallel",
                    remedy=f"start {rest * max(1, round(ranks / rest))} (--nproc), or choose other degrees",
                )
            degrees[open_ones[0]] = ranks // rest
        layout = Layout(**degrees)
        if layout.ranks != ranks:
            raise ConfigError(
                f"{layout} takes {layout.ranks} processes, and there {_are(ranks)}",
                where="parallel",
                remedy=f"start {layout.ranks} (--nproc {layout.ranks}), or set one degree to -1",
            )
        whole = layout.fsdp * layout.tp
        if layout.ep > 1 and (layout.ep % layout.tp or whole % layout.ep):
            raise ConfigError(
                f"ep {layout.ep} is no multiple of tp {layout.tp} that divides dp_shard x cp x tp = {whole}",
                where="parallel.ep",
                remedy=f"set it to {_nearest_ep(layout)}",
            )
        return layout

    def __str__(self) -> str:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        order = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
        said = _said({name: named[name] for name in order if named[name] > 1})
        return said or "one process"


def _said(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _are(ranks: int) -> str:
    return "is 1" if ranks == 1 else f"are {ranks}"


def _nearest_ep(layout: Layout) -> int:
    whole = layout.fsdp * layout.tp
    fitting = [ep for ep in range(layout.tp, whole + 1, layout.tp) if whole % ep == 0]
    return min(fitting, key=lambda ep: (abs(ep - layout.ep), ep))


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
