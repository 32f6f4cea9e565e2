"""Weights of a checkpoint on disk, by name, each read only when it is asked for.

Only safetensors files and `.bin` files that hold nothing but tensors are read; nothing in them is ever executed.
Reads go through `pread` into fresh memory: a mapped file would count a second time while it is being copied, and
would tie the model to a file that somebody may overwrite.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from luthier.errors import ModelError

_ROWS = 4096
_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights: safetensors if there are any, else `.bin`.

    Raises:
        ModelError: there are none, an index names a file that is not there, or one outside the directory.
    """
    for name in (_SAFETENSORS, _BIN):
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return _of_index(index)
    remedy = "is the download complete? from_scratch: true trains random weights"
    raise ModelError(f"there is no {_SAFETENSORS} and no {_BIN}", where=str(directory), remedy=remedy)


def _of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError("the index of the weights cannot be read", where=str(index)) from error
    files = [index.parent / name for name in names]
    for file in files:
        if not file.is_file() or file.parent != index.parent:
            raise ModelError(f"it names {file.name!r}, which is not there", where=str(index), remedy="fetch it again")
    return files


@contextmanager
def open_weights(directory: Path) -> Iterator[dict[str, Any]]:
    """The weights in a directory while the files are open.

    Yields:
        name -> a tensor, or a slice that becomes one by `[...]` and has `get_shape()` and `get_dtype()`.

    Raises:
        ModelError: a file is damaged, or holds more than tensors.
    """
    with ExitStack() as files:
        weights: dict[str, Any] = {}
        for file in weight_files(directory):
            if file.suffix == ".safetensors":
                try:
                    handle = files.enter_context(safe_open(str(file), framework="pt", device="cpu", backend="pread"))
                except SafetensorError as error:
                    raise ModelError(
                        f"it is no safetensors file: {error}", where=str(file), remedy="fetch it again"
                    ) from error
                weights.update({name: handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118 - no dict
            else:
                weights.update(_read_bin(file))
        yield weights


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        remedy = "convert it to safetensors where you trust it"
        raise ModelError(
            "it holds more than tensors, or is damaged, and was not read", where=str(file), remedy=remedy
        ) from error
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def same_bits(left: Any, right: Any) -> bool:
    """Whether two weights are equal in shape and in every value; some rows at a time, since they may be the largest."""
    shape, other = (
        [int(n) for n in (w.shape if isinstance(w, torch.Tensor) else w.get_shape())] for w in (left, right)
    )
    if shape != other:
        return False
    if not shape:
        return bool(left[...] == right[...])
    rows = (slice(start, min(start + _ROWS, shape[0])) for start in range(0, shape[0], _ROWS))
    return all(_equal_rows(left, right, some) for some in rows)


def _equal_rows(left: Any, right: Any, rows: slice) -> bool:
    a, b = left[rows], right[rows]
    return a.dtype == b.dtype and torch.equal(a, b)


def checkpoint_dtype(directory: Path) -> torch.dtype | None:
    """The floating dtype that most of a checkpoint's numbers have; None if it holds none."""
    counts: dict[torch.dtype, int] = {}
    with open_weights(directory) as weights:
        for value in weights.values():
            if isinstance(value, torch.Tensor):
                dtype, shape = value.dtype, value.shape
            else:
                dtype, shape = _DTYPES.get(value.get_dtype(), torch.int64), value.get_shape()
            if dtype.is_floating_point:
                counts[dtype] = counts.get(dtype, 0) + int(torch.Size(shape).numel())
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
