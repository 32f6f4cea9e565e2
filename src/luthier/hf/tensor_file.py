"""A safetensors file whose tensors are laid out before their values are known, and then written one at a time.

The library's own writer wants all values at once. Here the header goes first, so that values can come in any order, one
after another, and from several processes, and none of them is held longer than it takes to write it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's dtypes under the names that safetensors gives them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, value: torch.Tensor) -> Entry:
        """What a tensor, on meta or not, takes in a file."""
        return Entry(name, value.dtype, tuple(value.shape))

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFile:
    """One file, open for writing.

    Args:
        path: where.
        entries: all tensors of the file.
        metadata: text in the header beside them.
        create: make the file with its header; otherwise another process has, from the same entries, and this one writes
            its own tensors into it.
    """

    def __init__(
        self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None, *, create: bool = True
    ) -> None:
        self._entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        content: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        offset = 0
        # Wide dtypes first, so that each tensor starts at a multiple of its items' size.
        for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
            end = offset + entry.nbytes
            content[entry.name] = {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, end],
            }
            self._entries[entry.name], self._offsets[entry.name] = entry, offset
            offset = end
        header = json.dumps(content, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._start = 8 + len(header)
        self._file = path.open("w+b" if create else "r+b")
        if create:
            self._file.write(struct.pack("<Q", len(header)) + header)
            self._file.truncate(self._start + offset)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write one tensor of any device; its dtype and shape are those announced."""
        entry = self._entries[name]
        assert Entry.of(name, value) == entry, f"{name} is {value.dtype} {list(value.shape)}, announced was {entry}"
        if value.numel():
            self._file.seek(self._start + self._offsets[name])
            self._file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush everything to the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def drop(self) -> None:
        """Let go of the file as it is."""
        self._file.close()
