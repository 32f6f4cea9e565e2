"""The tensors of a checkpoint: each rank writes the parts that it holds, and reads the parts that it needs.

A rank's file holds blocks of tensors, and its header says where in the whole tensor each block begins (in the form that
torch's DCP uses, whose Hugging Face reader can open the files). Parts are cut on reading as the reader needs them, so
nothing in a checkpoint depends on the layout that it was written on.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from luthier.engine.state import TrainState
from luthier.errors import CheckpointError
from luthier.hf.gather import blocks, coordinate_of, local_part, reshard
from luthier.hf.routing import find_biases
from luthier.hf.tensor_file import NAMES, Entry, TensorFile

_CHECKSUM = ".checksum.json"
"""Ending of the file beside each file of tensors."""
_PIECE = 1 << 24
_OFFSETS = "DCP_SHARDING_INFO"
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor in memory: `values` begins at `offsets` of the whole; `key` is its name in the file."""

    key: str
    offsets: tuple[int, ...]
    values: torch.Tensor


@dataclass(slots=True)
class Stored:
    """A tensor on disk: its dtype, and where its blocks lie: offsets -> (shape, file, key)."""

    dtype: torch.dtype
    parts: dict[tuple[int, ...], tuple[tuple[int, ...], Path, str]] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        ends = [[a + b for a, b in zip(at, shape, strict=True)] for at, (shape, _, _) in self.parts.items()]
        return torch.Size(max(axis) for axis in zip(*ends, strict=True))


def tensors_of(state: TrainState, trainable_only: bool) -> Tensors:
    """What a checkpoint holds, by name: weights, and optimizer states under their weight's name; no copies.

    Args:
        state: of which this rank may hold a part.
        trainable_only: leave frozen weights out.
    """
    reshard(state.model)
    tensors: Tensors = {}
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, name in names.items():
        if parameter.requires_grad or not trainable_only:
            tensors[f"model.{name}"] = parameter.detach()
    if not trainable_only:  # biases of routers may move, though no gradient moves them
        buffers = dict(state.model.named_buffers())
        tensors |= {f"model.{name}": buffers[name] for name in find_biases(state.model).values() if name in buffers}
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{names[parameter]}.{key}"] = value
    return tensors


def blocks_to_write(tensors: Tensors, holders: Mapping[str, Sequence[int]], rank: int) -> list[Block]:
    """What this rank writes: its part of every tensor, of those that others hold too its share; no copies.

    Args:
        tensors: what it holds.
        holders: of each, the ranks of the stage that writes it.
        rank: this one.
    """
    found: list[Block] = []
    for name, tensor in tensors.items():
        if rank not in holders[name]:
            continue
        turn = zlib.crc32(name.encode())  # spreads what several hold alike over them
        if isinstance(tensor, DTensor):
            place, copies = _replica(tensor)
            if turn % copies == place:
                for number, (here, whole) in enumerate(_own_blocks(tensor)):
                    key = name if number == 0 else f"{name}@{number}"
                    found.append(Block(key, tuple(part.start for part in whole), local_part(tensor)[here]))
        elif holders[name][turn % len(holders[name])] == rank:
            found.append(Block(name, (0,) * tensor.ndim, tensor.detach()))
    return found


def write(parts: Sequence[Block], path: Path) -> None:
    """Write this rank's file and its checksum, flushed to the disk; a block at a time, so nothing is held twice."""
    offsets = {part.key: {"saved_offsets": list(part.offsets)} for part in parts}
    metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
    file = TensorFile(path, [Entry.of(part.key, part.values) for part in parts], metadata)
    try:
        for part in parts:
            file.write(part.key, part.values)
        file.close()
    finally:
        file.drop()
    write_json(path.with_suffix(_CHECKSUM), {"crc32": _checksum(path)})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small file, flushed to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> int:
    """CRC-32 of a file, read piece by piece."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found


def _require_as_written(directory: Path, rank: int, ranks: int) -> None:
    for path in sorted(directory.glob("*.safetensors"))[rank::ranks]:
        try:
            written = json.loads(path.with_suffix(_CHECKSUM).read_text(encoding="utf-8"))["crc32"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"its checksum cannot be read ({error})", where=str(path)) from error
        if _checksum(path) != written:
            raise CheckpointError("its bytes are not those that were written", where=str(path))


def stored_tensors(directory: Path, rank: int, ranks: int) -> dict[str, Stored]:
    """What the files of a checkpoint hold, by name, from their headers. The bytes of each file are compared with the
    checksum that was taken when it was written, by one of the ranks.

    Args:
        directory: of the tensors.
        rank: this one.
        ranks: how many there are, all of which make the call.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    found: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                offsets = json.loads(file.metadata()[_OFFSETS])
                for key in file.keys():  # noqa: SIM118 - no dict
                    part = file.get_slice(key)
                    stored = found.setdefault(key.partition("@")[0], Stored(_DTYPES[part.get_dtype()]))
                    stored.parts[tuple(offsets[key]["saved_offsets"])] = (tuple(part.get_shape()), path, key)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"tensors cannot be read ({error})", where=str(path)) from error
    if not found:
        raise CheckpointError("its tensors are missing", where=str(directory))
    _require_as_written(directory, rank, ranks)
    return found


@torch.no_grad()
def read(tensors: Tensors, stored: Mapping[str, Stored]) -> None:
    """Fill what this rank holds of every tensor, each block from wherever its values lie; nothing else is read.

    Args:
        tensors: names, shapes and dtypes are those stored.
        stored: of `stored_tensors`.

    Raises:
        CheckpointError: some values are in no file.
    """
    with ExitStack() as stack:
        files: dict[Path, safe_open] = {}
        for name, tensor in tensors.items():
            for here, whole in _own_blocks(tensor):
                target = local_part(tensor)[here]
                filled = 0
                for offsets, (shape, path, key) in stored[name].parts.items():
                    common = [
                        (max(part.start, start), min(part.stop, start + size))
                        for part, start, size in zip(whole, offsets, shape, strict=True)
                    ]
                    if any(begin >= end for begin, end in common):
                        continue
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt", backend="pread"))
                    there = tuple(slice(b - start, e - start) for (b, e), start in zip(common, offsets, strict=True))
                    values = files[path].get_slice(key)[there] if there else files[path].get_tensor(key)
                    into = tuple(
                        slice(b - part.start, e - part.start) for (b, e), part in zip(common, whole, strict=True)
                    )
                    target[into].copy_(values)
                    filled += values.numel()
                if filled != target.numel():
                    lost = target.numel() - filled
                    where = str(next(iter(stored[name].parts.values()))[1].parent)
                    raise CheckpointError(f"{lost} values of {name} are in no file", where=where)


def _own_blocks(tensor: torch.Tensor) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """[(place in this rank's part, place in the whole tensor)]."""
    if not isinstance(tensor, DTensor):
        everything = tuple(slice(0, size) for size in tensor.shape)
        return [(everything, everything)]
    coordinate = coordinate_of(tensor, dist.get_rank())
    assert coordinate is not None
    return list(blocks(tensor, coordinate))


def _replica(tensor: DTensor) -> tuple[int, int]:
    """Which of how many equal copies of its part this rank holds."""
    coordinate = coordinate_of(tensor, dist.get_rank())
    assert coordinate is not None
    place, copies = 0, 1
    for index, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(index)
            place, copies = place * size + coordinate[index], copies * size
    return place, copies
