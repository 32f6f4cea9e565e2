"""What a format is: a class that turns one row into samples. One of your own has exactly this shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from luthier.batch import ASKED, Sample
from luthier.config.sections import SourceConfig
from luthier.data.report import BadRow
from luthier.hf.render import Encoder, Tokenizer

Row = Mapping[str, Any]
Samples = Sample | list[Sample] | None


class Format(Protocol):
    """A row format. `format: package.module:Class` in a source names one of your own.

    A format may also have an attribute `stop_ids`, a set of the token ids that end what the model says; generation
    and the exported generation config stop on them. And an attribute `remarks`, a Counter of what is worth knowing
    about rows ("without their system message").
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        """Make ready for the rows of one source; `source.options` is yours."""

    def __call__(self, row: Row) -> Samples:
        """The samples of a row; None for an empty one.

        Raises:
            BadRow: the row cannot be used. (Any UserError or ValueError is taken for that.)
        """


def text_of(row: Row, column: str) -> str | None:
    """The text of a column; None where it is null or nothing but white space.

    Raises:
        BadRow: the row has no such column, or it holds no text.
    """
    if column not in row:
        seen = ", ".join(str(name) for name in row) or "none"
        raise BadRow(f"there is no column {column!r} (columns: {seen})", reason=f"column {column!r} is missing")
    value = row[column]
    if value is None:
        return None
    if not isinstance(value, str):
        kind = type(value).__name__
        remedy = "set data.*.format: chat if it holds messages" if isinstance(value, list) else None
        raise BadRow(f"column {column!r} holds {kind}, not text", reason=f"column {column!r} is no text", remedy=remedy)
    return value if value.strip() else None


def plain_sample(encoder: Encoder, prompt: str, completion: str, train_on_input: bool) -> Sample:
    """Prompt and completion as one text with an EOS at its end; the completion trains.

    Tokens may merge across the border, so the trained tokens begin where the ids of the prompt and the ids of both
    part: up to there the context is the one that the model sees when it is asked.
    """
    ids = closed(encoder, encoder.encode_document(prompt + completion))
    given = encoder.encode_document(prompt) if prompt else encoder.bos
    start = 0 if train_on_input else common_prefix(given, ids)
    sample = Sample.from_ids(ids, [0.0] * start + [1.0] * (len(ids) - start))
    return replace(sample, meta={ASKED: True}) if start == len(given) == 1 and given != encoder.bos else sample


def closed(encoder: Encoder, ids: list[int]) -> list[int]:
    """The ids with one EOS at their end."""
    return ids if encoder.eos is None or ids[-1:] == [encoder.eos] else [*ids, encoder.eos]


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of ids that both begin with."""
    size = min(len(left), len(right))
    return next((index for index in range(size) if left[index] != right[index]), size)
