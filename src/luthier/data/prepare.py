"""Rows to samples: read, format, fit; faults become errors or counts. Cache and stream both go this way."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from luthier.batch import Sample
from luthier.config.kinds import kind_of
from luthier.config.sections import DataConfig, SourceConfig
from luthier.data.formats import Format, detect, make_format
from luthier.data.formats.random import random_rows
from luthier.data.length import fit
from luthier.data.pictures import Album, has_pictures
from luthier.data.report import BadRow, DataReport
from luthier.data.sources import Origin, RawRow, read_rows
from luthier.errors import DataError, UserError
from luthier.hf.render import Tokenizer
from luthier.hf.vision.sight import blindness, sight_of
from luthier.own_code import own_code, told_of

Progress = Callable[[int, int | None], None]
"""Called with rows done, and rows in all where that is known."""

_PEEKED = 32
_REMEDY = "mend the row, or leave such rows out with data.on_bad_row: skip"


@dataclass(slots=True)
class SourceReader:
    """One source with its format: raw rows come out of `rows`, and `samples` turns one into samples.

    Attributes:
        source: the source.
        data: length and fault policies.
        tokenizer: for the format.
        files: its files, where they have been found already.
        loaded: its `datasets` object, where it has been loaded already.
        report: what became of the rows.
        store: where images are kept that lie in no files of their own; None for memory.
    """

    source: SourceConfig
    data: DataConfig
    tokenizer: Tokenizer
    files: list[Path] | None = None
    loaded: Any = None
    report: DataReport = field(default_factory=DataReport)
    store: Path | None = None
    _format: Format | None = None
    _album: Album | None = None

    def rows(self) -> Iterator[RawRow]:
        """All rows from the start, bad ones among them.

        Raises:
            DataError: the source cannot be read, holds no rows, or its format cannot be told.
        """
        if self.source.format == "random":
            numbered = ((row, Origin("random", row["number"] + 1, "row")) for row in random_rows(self.source))
            self._make("random")
            yield from numbered
            return
        rows = read_rows(self.source, self.files, self.loaded)
        first = list(itertools.islice(rows, _PEEKED))
        if not first:
            raise DataError(f"no rows in {_names(self.source, self.files)}")
        if self._format is None:
            # the first rows together, since the very first may be the one that lacks a column
            columns = dict.fromkeys(name for row, _ in first if not isinstance(row, BadRow) for name in row)
            if columns or self.source.format is not None:
                self._make(self.source.format or detect(columns, self.source, kind_of(self.data)))
        yield from itertools.chain(first, rows)

    def samples(self, raw: RawRow) -> list[Sample]:
        """What a row is trained on as; nothing for a row that is empty, left out or skipped.

        Raises:
            DataError: the row cannot be used (on_bad_row: raise), or is too long (too_long: raise).
        """
        row, origin = raw
        self.report.read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            samples = self._of_format(row, origin)
        except BadRow as fault:
            placed = fault.at(str(origin))
            if self.data.on_bad_row == "raise":
                placed = BadRow(fault.what, reason=fault.reason, where=str(origin), remedy=fault.remedy or _REMEDY)
                raise placed from fault.__cause__
            self.report.skip(placed)
            return []
        samples = [replace(sample, origin=str(origin)) for sample in samples if len(sample)]
        if not samples:
            self.report.empty += 1
            self.report.note("empty", str(origin))
        longest, policy, kind = self.data.sequence_length, self.data.too_long, kind_of(self.data)
        return [piece for sample in samples for piece in fit(sample, longest, policy, self.report, kind)]

    def root(self, file: str) -> Path | None:
        """Where paths of images in a file's rows start; None for rows of no directory."""
        if self.source.image_root is not None:
            return Path(self.source.image_root)
        return Path(file).parent if self.files is not None else None

    def roots(self, names: Sequence[str]) -> list[Path | None]:
        return [self.root(name) for name in names]

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that ended what the model is to say, in the rows seen so far."""
        return set(getattr(self._format, "stop_ids", ()))

    def _of_format(self, row: dict[str, Any], origin: Origin) -> list[Sample]:
        """What the format makes of a row; one of the user's own is not trusted to be as it should."""
        name = self.source.format or ""
        if ":" not in name:
            return _listed(self._made(row, origin))

        def fault(error: BaseException) -> DataError:
            remedy = "mend the format; with a ValueError it says that a row cannot be used"
            return DataError(f"format {name} {told_of(error)}", where=str(origin), remedy=remedy)

        with own_code(fault):
            samples = _listed(self._made(row, origin))
        for other in samples:
            if not isinstance(other, Sample):
                what = f"format {name} gives a {type(other).__name__}, where a Sample, a list of them or None belongs"
                raise DataError(what, where=str(origin))
        if not all(np.isfinite(sample.weights).all() for sample in samples):
            raise BadRow("the format gives weights that are not finite", reason="weights that are not finite")
        return samples

    def _made(self, row: dict[str, Any], origin: Origin) -> Sample | list[Sample] | None:
        sight = sight_of(self.tokenizer)
        told = kind_of(self.data)
        if sight is None or told != "documents":
            if (column := has_pictures(row, self.source)) is not None:
                why, remedy = blindness(self.tokenizer)
                if sight is not None:
                    why, remedy = f"{told} have none", "train on them with method sft"
                what = f"column {column!r} holds images, and {why}"
                raise BadRow(what, reason="images that are not read", remedy=remedy)
            return self._formatted(row)
        if self._album is None:
            self._album = Album(sight, self.source, self.store)
        longest, policy = self.data.sequence_length, self.data.too_long
        return self._album.seen(row, self.root(origin.file), self._formatted, longest=longest, policy=policy)

    def _formatted(self, row: dict[str, Any]) -> Sample | list[Sample] | None:
        if self._format is None:
            # every row that told the columns was bad
            self._make(detect(row, self.source, kind_of(self.data)))
        assert self._format is not None
        try:
            return self._format(row)
        except BadRow:
            raise
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            what = f"a text holds half of a surrogate pair ({half}), which is no character"
            raise BadRow(what, reason="half of a surrogate pair") from error
        except UserError as error:
            raise BadRow(error.what, reason=error.what, remedy=error.remedy) from error
        except ValueError as error:
            raise BadRow(f"the format refuses the row ({error})", reason="refused by the format") from error

    def _make(self, name: str) -> None:
        if self._format is None:
            self._format = make_format(name, self.tokenizer, self.source, kind_of(self.data))
            remarks: Counter[str] | None = getattr(self._format, "remarks", None)
            if remarks is not None:
                self.report.remarks = remarks


def _listed(made: Sample | list[Sample] | None) -> list[Sample]:
    return made if isinstance(made, list) else [] if made is None else [made]


def _names(source: SourceConfig, files: list[Path] | None) -> str:
    return str(files[0]) if files is not None and len(files) == 1 else source.path
