"""Luthier's door to the benchmark's rows: a format of one's own, as `format: token_rows:TokenRows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luthier.batch import Sample
from workloads import IGNORED


class TokenRows:
    """A row holds `input_ids` and `labels` already."""

    def __init__(self, tokenizer: Any, source: Any) -> None:
        del tokenizer, source  # nothing is left to tokenise

    def __call__(self, row: Mapping[str, Any]) -> Sample:
        return Sample.from_ids(row["input_ids"], [float(label != IGNORED) for label in row["labels"]])
