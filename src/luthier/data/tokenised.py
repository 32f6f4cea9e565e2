"""Tokenised rows as flat arrays: written piece by piece, read back memory-mapped. Plain bytes and JSON, no pickle."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from luthier.batch import Picture, Sample
from luthier.data.picture_files import Stamp, unpack
from luthier.data.report import DataReport
from luthier.data.sources.origin import Origin

COLUMNS: dict[str, str] = {
    "tokens": "<i4",
    "targets": "<i4",
    "weights": "<f4",
    "lengths": "<i8",
    "trained": "<i8",
    "weight_sums": "<f8",
    "document": "<i8",
    "origin_file": "<i4",
    "origin_number": "<i8",
    "documents": "<i8",
    "parts": "<i8",
    "meta": "|u1",
    "meta_sizes": "<i8",
    "pictures": "|u1",
    "picture_sizes": "<i8",
}
"""Name -> dtype. The first three have an entry per position, `parts` (lengths) one per document, `meta` (JSON, nothing
where there is none) and `pictures` (as `picture_files` packs them) one per byte, the others one per sample.

An origin number counts lines, or rows where it is negative.
"""
_META = "meta.json"


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The samples of one source.

    Attributes:
        columns: the arrays of `COLUMNS`.
        starts: int64 [samples + 1], where each sample begins in the first three.
        part_starts: the same in `parts`.
        meta_starts: the same in `meta`.
        origins: names that `origin_file` points at.
        report: what became of the rows.
        stop_ids: tokens that ended what the model is to say.
        content: hash over sizes and checksums of all arrays.
        picture_starts: int64 [samples + 1], where each sample's pictures begin.
        stamps: of the files of pictures, to tell whether they have changed.
        roots: where paths of pictures start, for each of `origins`.
        store: where pictures are kept that lie in no files of their own.
    """

    columns: dict[str, np.ndarray]
    starts: np.ndarray
    part_starts: np.ndarray
    meta_starts: np.ndarray
    origins: list[str]
    report: DataReport
    stop_ids: list[int]
    content: str
    picture_starts: np.ndarray
    stamps: list[Stamp] = field(default_factory=list)
    roots: Sequence[Path | None] = ()
    store: Path | None = None

    def __len__(self) -> int:
        return len(self.columns["lengths"])

    def __getitem__(self, index: int) -> Sample:
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        tokens, targets, weights = (self.columns[name][start:end] for name in ("tokens", "targets", "weights"))
        parts: list[int] = self.columns["parts"][self.part_starts[index] : self.part_starts[index + 1]].tolist()
        meta = self.columns["meta"][self.meta_starts[index] : self.meta_starts[index + 1]].tobytes()
        return Sample(
            tokens.astype(np.int64),
            targets.astype(np.int64),
            np.array(weights),
            self.origin(index),
            tuple(parts) if len(parts) > 1 else (),
            json.loads(meta) if meta else {},
            pictures=self.pictures(index),
        )

    def pictures(self, index: int) -> tuple[Picture, ...]:
        """Of a sample."""
        start, end = int(self.picture_starts[index]), int(self.picture_starts[index + 1])
        if start == end:
            return ()
        root = self.roots[int(self.columns["origin_file"][index])] if self.roots else None
        return unpack(self.columns["pictures"][start:end].tobytes(), root, self.store)

    def origin(self, index: int) -> str:
        """File and line of a sample."""
        file = self.origins[int(self.columns["origin_file"][index])]
        number = int(self.columns["origin_number"][index])
        return str(Origin(file, number) if number >= 0 else Origin(file, -number, "row"))


class Writer:
    """Takes samples one by one and lays them into the arrays.

    Args:
        open_column: gives a writable stream for a column.
    """

    def __init__(self, open_column: Callable[[str], BinaryIO]) -> None:
        self._streams = {name: open_column(name) for name in COLUMNS}
        self._checks = dict.fromkeys(COLUMNS, 0)
        self._sizes = dict.fromkeys(COLUMNS, 0)

    def add(self, sample: Sample, document: int, origin_file: int, origin: Origin, pictures: bytes = b"") -> None:
        """Append a sample that came from the `document`-th row, with its packed pictures."""
        meta = json.dumps(sample.meta).encode() if sample.meta else b""
        values: dict[str, Any] = {
            "tokens": sample.tokens,
            "targets": sample.targets,
            "weights": sample.weights,
            "lengths": [len(sample)],
            "trained": [np.count_nonzero(sample.weights)],
            "weight_sums": [sample.weights.sum(dtype=np.float64)],
            "document": [document],
            "origin_file": [origin_file],
            "origin_number": [origin.number if origin.unit == "line" else -origin.number],
            "documents": [len(sample.lengths)],
            "parts": sample.lengths,
            "meta": np.frombuffer(meta, np.uint8),
            "meta_sizes": [len(meta)],
            "pictures": np.frombuffer(pictures, np.uint8),
            "picture_sizes": [len(pictures)],
        }
        for name, value in values.items():
            data = np.asarray(value).astype(COLUMNS[name]).tobytes()
            self._streams[name].write(data)
            self._checks[name] = zlib.crc32(data, self._checks[name])
            self._sizes[name] += len(data)

    def meta(
        self, origins: list[str], report: DataReport, stop_ids: set[int], stamps: Sequence[Stamp] = ()
    ) -> dict[str, Any]:
        """What has to be known to read the arrays back, and to tell whether they are whole."""
        columns = {name: [self._sizes[name], self._checks[name]] for name in COLUMNS}
        return {
            "columns": columns,
            "origins": origins,
            "report": report.to_dict(),
            "stop_ids": sorted(stop_ids),
            "stamps": [list(stamp) for stamp in stamps],
        }


class MemoryColumns:
    """Columns kept in memory, for `cache: false`."""

    def __init__(self) -> None:
        self._streams = {name: io.BytesIO() for name in COLUMNS}

    def open(self, name: str) -> BinaryIO:
        return self._streams[name]

    def read(self, name: str) -> np.ndarray:
        return np.frombuffer(self._streams[name].getbuffer(), dtype=COLUMNS[name])


def assemble(meta: dict[str, Any], read: Callable[[str], np.ndarray]) -> Tokenised:
    """Samples from their arrays."""
    columns = {name: read(name) for name in COLUMNS}

    def starts(name: str) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(columns[name], dtype=np.int64)])

    return Tokenised(
        columns=columns,
        starts=starts("lengths"),
        part_starts=starts("documents"),
        meta_starts=starts("meta_sizes"),
        origins=list(meta["origins"]),
        report=DataReport.from_dict(meta["report"]),
        stop_ids=[int(token) for token in meta["stop_ids"]],
        content=hashlib.sha256(json.dumps(meta["columns"], sort_keys=True).encode()).hexdigest(),
        picture_starts=np.concatenate([[0], np.cumsum(columns["picture_sizes"], dtype=np.int64)]),
        stamps=[(str(path), int(size), int(changed)) for path, size, changed in meta["stamps"]],
    )


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Written last: arrays without it do not count."""
    (directory / _META).write_text(json.dumps(meta), encoding="utf-8")


def open_directory(directory: Path) -> Tokenised | None:
    """Samples from a directory, memory-mapped; None if it is not there, or not whole."""
    try:
        meta = json.loads((directory / _META).read_text(encoding="utf-8"))
        columns = meta["columns"]

        def read(name: str) -> np.ndarray:
            size, check = columns[name]
            path = directory / f"{name}.bin"
            if path.stat().st_size != size:
                raise ValueError(name)
            dtype = np.dtype(COLUMNS[name])
            array = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
            if _crc(array) != check:
                raise ValueError(name)
            return array

        return assemble(meta, read)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _crc(array: np.ndarray) -> int:
    check, step = 0, 1 << 22
    for start in range(0, len(array), step):
        check = zlib.crc32(array[start : start + step].tobytes(), check)
    return check
