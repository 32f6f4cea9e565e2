"""What became of the rows: how many were read, kept, skipped, empty, cut, dropped, and why, in words for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from luthier.errors import DataError

EXAMPLES = 3


class BadRow(DataError):
    """One row that cannot be used; the policy on_bad_row decides whether it stops the run or is skipped and counted.

    Args:
        what: what is wrong with it, in full.
        reason: the kind of fault in a few words, the same for all rows with this fault; counted by.
    """

    def __init__(self, what: str, *, reason: str, where: str | None = None, remedy: str | None = None) -> None:
        self.reason = reason
        super().__init__(what, where=where, remedy=remedy)

    def at(self, where: str) -> BadRow:
        """The same fault, told where it is."""
        return BadRow(self.what, reason=self.reason, where=where, remedy=self.remedy)


@dataclass(slots=True)
class DataReport:
    """Counts over the rows of one or several sources.

    Attributes:
        read: rows found, blank lines not among them.
        kept: samples that can be trained on (a row that is split gives several).
        skipped: reason -> rows that could not be used (on_bad_row: skip).
        empty: rows without text.
        truncated, dropped, split: rows longer than sequence_length, by what happened to them.
        remarks: what is worth knowing about rows that were kept -> how many.
        untrained: samples left out because no trained token was in them, or was left after cutting.
        cut_tokens: tokens that truncation took away.
        tokens, trained_tokens: positions kept, and those of them that are trained on.
        examples: kind of fault -> the first few places, as whole sentences.
    """

    read: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    untrained: int = 0
    cut_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    remarks: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def skipped_rows(self) -> int:
        return sum(self.skipped.values())

    def skip(self, fault: BadRow) -> None:
        """Count a bad row."""
        self.skipped[fault.reason] += 1
        self.note(fault.reason, str(fault))

    def note(self, kind: str, sentence: str) -> None:
        """Keep the first few places of a kind."""
        places = self.examples.setdefault(kind, [])
        if len(places) < EXAMPLES:
            places.append(sentence)

    def add(self, other: DataReport) -> None:
        """Add the counts of another source."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped.update(other.skipped)
        self.remarks.update(other.remarks)
        for kind, places in other.examples.items():
            for place in places:
                self.note(kind, place)

    def moved(self, names: Mapping[str, str]) -> DataReport:
        """The same of files that have other names now; the places begin with these."""

        def now(place: str) -> str:
            old = max((name for name in names if place.startswith(f"{name}:")), key=len, default="")
            return names[old] + place.removeprefix(old) if old else place

        return replace(
            self, examples={kind: [now(place) for place in places] for kind, places in self.examples.items()}
        )

    def lines(self) -> list[str]:
        """The report in words, a sentence a line; what did not happen is not mentioned."""
        kept = f"{self.kept:,} kept: {self.tokens:,} tokens, {self.trained_tokens:,} trained on"
        told = [f"{_rows(self.read)} read, {kept}"]
        for reason, count in sorted(self.skipped.items()):
            told.append(f"{_rows(count)} skipped: {reason}{self._first(reason)}")
        for count, what, kind in (
            (self.empty, "empty, left out", "empty"),
            (self.truncated, f"cut to the sequence length ({self.cut_tokens:,} tokens lost)", "truncated"),
            (self.dropped, "dropped, longer than the sequence length", "dropped"),
            (self.split, "split into pieces of the sequence length", "split"),
            (self.untrained, "left out: no trained tokens left", "untrained"),
        ):
            if count:
                told.append(f"{_rows(count)} {what}{self._first(kind)}")
        told += [f"{_rows(count)} kept {remark}" for remark, count in sorted(self.remarks.items())]
        return told

    def _first(self, kind: str) -> str:
        places = self.examples.get(kind)
        return f" (first: {places[0]})" if places else ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        examples = {kind: list(places) for kind, places in self.examples.items()}
        return {**counts, "skipped": dict(self.skipped), "remarks": dict(self.remarks), "examples": examples}

    @staticmethod
    def from_dict(value: dict[str, Any]) -> DataReport:
        counts = {name: int(value[name]) for name in _COUNTS}
        skipped, remarks = Counter(value["skipped"]), Counter(value["remarks"])
        return DataReport(**counts, skipped=skipped, remarks=remarks, examples=dict(value["examples"]))


_COUNTS = (
    *("read", "kept", "empty", "truncated", "dropped", "split", "untrained"),
    *("cut_tokens", "tokens", "trained_tokens"),
)


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"
