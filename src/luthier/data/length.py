"""What happens to a sample of more positions than sequence_length; each such sample is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from luthier.batch import Sample
from luthier.data.report import DataReport
from luthier.errors import DataError

Policy = Literal["truncate", "drop", "raise", "split"]


def fit(sample: Sample, longest: int, policy: Policy, report: DataReport) -> list[Sample]:
    """The samples that are left of one.

    Args:
        sample: T positions.
        longest: most positions allowed.
        policy: truncate (the end is cut off), drop, raise, or split (pieces of `longest`, no token lost, none twice).
        report: counted in.

    Raises:
        DataError: the sample is too long and the policy is raise.
    """
    pieces = [sample]
    if len(sample) > longest:
        told = f"{sample.origin} has {len(sample):,} tokens"
        match policy:
            case "raise":
                remedy = "raise data.sequence_length, or set data.too_long to truncate, drop or split"
                what = f"the row has {len(sample):,} tokens, more than the sequence length {longest:,}"
                raise DataError(what, where=sample.origin, remedy=remedy)
            case "drop":
                report.dropped += 1
                report.note("dropped", told)
                return []
            case "truncate":
                report.truncated += 1
                report.cut_tokens += len(sample) - longest
                report.note("truncated", told)
                pieces = [_cut(sample, 0, longest)]
            case "split":
                report.split += 1
                report.note("split", told)
                pieces = [_cut(sample, start, start + longest) for start in range(0, len(sample), longest)]
    kept = []
    for piece in pieces:
        if not piece.weights.any():
            report.untrained += 1
            report.note("untrained", piece.origin)
            continue
        kept.append(piece)
        report.kept += 1
        report.tokens += len(piece)
        report.trained_tokens += int((piece.weights != 0).sum())
    return kept


def _cut(sample: Sample, start: int, end: int) -> Sample:
    return replace(
        sample,
        tokens=sample.tokens[start:end],
        targets=sample.targets[start:end],
        weights=sample.weights[start:end],
    )
