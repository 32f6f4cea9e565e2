"""What happens to a row with a document of more positions than sequence_length; each such row is counted.

A row of several documents (two answers to one prompt) is too long where one of them is. What cuts or drops it does so
to all of it: half a pair compares nothing. Another prompt's answer beside a labelled one is no part of the row as its
maker wrote it: it is cut, and never decides what becomes of the row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from luthier.batch import ASKED, Sample
from luthier.config.kinds import Kind
from luthier.data.report import DataReport
from luthier.errors import ConfigError, DataError

Policy = Literal["truncate", "drop", "raise", "split"]


def fit(sample: Sample, longest: int, policy: Policy, report: DataReport, kind: Kind = "documents") -> list[Sample]:
    """The samples that are left of one.

    Args:
        sample: T positions.
        longest: most positions that a document may have.
        policy: truncate (the end is cut off; a prompt, which an answer is to follow, is left out instead), drop, raise,
            or split (pieces of `longest`, no token lost, none twice).
        report: counted in.
        kind: what the row is.

    Raises:
        DataError: the sample is too long and the policy is raise.
        ConfigError: the policy is split, and rows are no documents.
    """
    if policy == "split" and kind != "documents":
        what = f"{kind} cannot be split: a piece of an answer is no answer"
        raise ConfigError(what, where="data.too_long", remedy="use truncate, drop or raise")
    if kind == "labelled":
        sample = _foreign_cut(sample, longest)
    pieces = [sample]
    judged = sample.lengths[:1] if kind == "labelled" else sample.lengths
    most = max(judged)
    if most > longest:
        of = "a document" if len(judged) > 1 else "the row"
        told = f"{sample.origin} has {most:,} tokens"
        match policy:
            case "raise":
                others = "truncate, drop or split" if kind == "documents" else "truncate or drop"
                remedy = f"raise data.sequence_length, or set data.too_long to {others}"
                what = f"{of} has {most:,} tokens, more than the sequence length {longest:,}"
                raise DataError(what, where=sample.origin, remedy=remedy)
            case "truncate" if kind != "prompts":
                pieces = [_shortened(sample, longest)]
                report.truncated += 1
                report.cut_tokens += len(sample) - len(pieces[0])
                report.note("truncated", told)
            case "drop" | "truncate":
                report.dropped += 1
                report.note("dropped", told)
                return []
            case "split":
                report.split += 1
                report.note("split", told)
                pieces = [_cut(sample, start, start + longest) for start in range(0, len(sample), longest)]
    kept = []
    for piece in pieces:
        if kind != "prompts" and not all(document.weights.any() for document in piece.documents):
            report.untrained += 1
            report.note("untrained", piece.origin)
            continue
        kept.append(piece)
        report.kept += 1
        report.tokens += len(piece)
        report.trained_tokens += int((piece.weights != 0).sum())
    return kept


def _shortened(sample: Sample, longest: int) -> Sample:
    """The same row with the end of each document cut off."""
    if not sample.parts:
        return _cut(sample, 0, longest)
    documents = [_cut(document, 0, longest) for document in sample.documents]
    return replace(Sample.join(documents), origin=sample.origin, meta=sample.meta)


def _foreign_cut(sample: Sample, longest: int) -> Sample:
    """The same row with another prompt's answer cut off, or left out where nothing of it would be left."""
    own, *others = sample.documents
    kept = [cut for other in others if (cut := _cut(other, 0, longest)).weights.any()]
    if [len(cut) for cut in kept] == [len(other) for other in others]:
        return sample
    return replace(Sample.join([own, *kept]), origin=sample.origin, meta=sample.meta)


def _cut(sample: Sample, start: int, end: int) -> Sample:
    return replace(
        sample,
        tokens=sample.tokens[start:end],
        targets=sample.targets[start:end],
        weights=sample.weights[start:end],
        meta={key: value for key, value in sample.meta.items() if not start or key != ASKED},
    )
