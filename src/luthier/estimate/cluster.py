"""What a machine has: presets from the makers' data sheets, a file of one's own, or this machine, measured."""

from __future__ import annotations

import difflib
import socket
import threading
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from luthier.errors import ConfigError

GIB = 2**30

Rate = Annotated[float, Field(ge=1, le=1e24)]
"""Operations or bytes a second; what is beyond makes times that no number holds."""
Seconds = Annotated[float, Field(gt=0, le=3600)]


class Cluster(BaseModel):
    """Nodes of one kind. Bandwidths are bytes a second, of one GPU, in one direction."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # one infinity makes all times NaN

    name: str = ""
    gpus_per_node: PositiveInt
    memory_gib: PositiveFloat
    """Of one GPU."""
    bf16_flops: Rate
    """Dense matrix products a second that the maker promises (or that were measured)."""
    fp32_flops: Rate
    memory_bandwidth: Rate
    node_bandwidth: Rate
    """To the other GPUs of the node."""
    network_bandwidth: Rate
    """To other nodes."""
    flops_share: float = Field(default=1.0, gt=0, le=1)
    """What of the promised products large matrices reach."""
    bandwidth_share: float = Field(default=1.0, gt=0, le=1)
    """What of the promised bandwidths large messages reach."""
    launch_seconds: Seconds = 5e-6
    """From one kernel to the next: no operation is shorter."""
    message_seconds: Seconds = 2e-5
    """Of a collective of no bytes."""
    memory_share: float = Field(default=0.92, gt=0, le=1)
    """What of the memory tensors may take; the rest is for the driver, the network and gaps."""
    shared: bool = False
    """Ranks share one machine: its memory and its arithmetic are divided among them."""

    @property
    def memory(self) -> float:
        """Bytes of one GPU."""
        return self.memory_gib * GIB

    def peak(self, itemsize: int) -> float:
        """Products a second for elements of so many bytes."""
        return self.bf16_flops if itemsize == 2 else self.fp32_flops

    def for_ranks(self, ranks: int) -> Cluster:
        """What one of so many ranks has of it."""
        if not self.shared or ranks == 1:
            return self
        part = {name: getattr(self, name) / ranks for name in ("memory_gib", "bf16_flops", "fp32_flops")}
        part |= {name: getattr(self, name) / ranks for name in ("memory_bandwidth", "node_bandwidth")}
        return self.model_copy(update={**part, "gpus_per_node": ranks})


@cache
def presets() -> dict[str, Cluster]:
    """The table of clusters.yaml."""
    table = yaml.safe_load(files("luthier.estimate").joinpath("clusters.yaml").read_text(encoding="utf-8"))
    return {name: Cluster(name=name, **fields) for name, fields in table.items()}


def find_cluster(name: str, gpus_per_node: int | None = None) -> Cluster:
    """A cluster by its name.

    Args:
        name: a preset, "cpu" for this machine, or a YAML file with the fields of `Cluster`.
        gpus_per_node: instead of the preset's.

    Raises:
        ConfigError: there is none of this name, or the file's fields are not those of a cluster.
    """
    known = presets()
    if name in known:
        found = known[name]
    elif name == "cpu":
        found = this_machine()
    elif Path(name).is_file():
        found = _read(Path(name))
    else:
        names = [*known, "cpu"]
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose {', '.join(names)}, or a YAML file"
        raise ConfigError(f"there is no cluster {name!r}", where="--cluster", remedy=remedy)
    return found if gpus_per_node is None else found.model_copy(update={"gpus_per_node": gpus_per_node})


def _read(path: Path) -> Cluster:
    try:
        fields: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Cluster(**{"name": path.stem, **fields})
    except (yaml.YAMLError, TypeError, UnicodeError) as error:
        raise ConfigError("is no YAML map of numbers", where=str(path), remedy=_NEEDED) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{field}: {first['msg']}", where=str(path), remedy=_NEEDED) from error


_NEEDED = "give " + ", ".join(name for name, field in Cluster.model_fields.items() if field.is_required())


@cache
def this_machine() -> Cluster:
    """The CPU, measured in about a second: its products, its memory and its loopback, which all ranks share."""
    import torch

    from luthier.report.throughput import peak_flops

    cpu = torch.device("cpu")
    return Cluster(
        name="cpu",
        gpus_per_node=1,
        memory_gib=psutil.virtual_memory().total / GIB,
        bf16_flops=peak_flops(cpu, torch.bfloat16),
        fp32_flops=peak_flops(cpu, torch.float32),
        memory_bandwidth=_copies(),
        node_bandwidth=(loopback := _loopback()),
        network_bandwidth=loopback,
        flops_share=0.8,
        launch_seconds=1e-5,
        message_seconds=2e-4,
        shared=True,
    )


def _copies() -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    source = torch.ones(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return 2 * source.numel() / best


def _loopback() -> float:
    """Bytes a second through a socket of this machine."""
    left, right = socket.socketpair()
    data = bytes(16 << 20)
    sender = threading.Thread(target=left.sendall, args=(data,))
    begin = time.perf_counter()
    sender.start()
    received = 0
    while received < len(data):
        received += len(right.recv(1 << 20))
    seconds = time.perf_counter() - begin
    sender.join()
    left.close()
    right.close()
    return len(data) / seconds
