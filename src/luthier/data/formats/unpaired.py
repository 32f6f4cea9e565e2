"""Formats `unpaired`, an answer and whether it is good, and `prompt`, a prompt alone."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np

from luthier.batch import NO_TOKEN, Sample
from luthier.config.kinds import Kind
from luthier.config.sections import SourceConfig
from luthier.data.formats.answers import Answers, Said, without_prompt
from luthier.data.formats.base import Row, Samples
from luthier.data.formats.chat import MESSAGE_COLUMNS
from luthier.data.formats.preference import PROMPTS
from luthier.data.report import BadRow
from luthier.hf.render import Tokenizer

SAMPLED = ("prompts", "completions", "completion_ids")
"""What functions that judge answers are given beside the columns of a row."""

_REMEMBERED = 16
"""Answers to earlier prompts that one may be taken from."""


class UnpairedFormat:
    """Rows of `prompt`, `completion` and `label` (true where it is good); or of `chosen` and `rejected`, which give a
    good and a bad one.

    A sample holds two documents: the prompt with its answer, and the prompt with another prompt's answer, the newest
    before it in the source, of which KTO estimates how far the model is from its reference. The first row has none.
    """

    kind: Kind = "labelled"

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        fields = ("prompt", "completion", "label", "chosen", "rejected", "system")
        self._answers = Answers(tokenizer, source, fields)
        self.remarks = self._answers.remarks
        self._earlier: deque[tuple[Said, Said]] = deque(maxlen=_REMEMBERED)

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end what the model says."""
        return self._answers.stop_ids

    def __call__(self, row: Row) -> Samples:
        column = self._answers.column
        prompt = self._answers.said(row, "prompt") if column("prompt") in row else None
        if column("chosen") in row and column("rejected") in row and column("label") not in row:
            good, bad = (self._answers.said(row, name) for name in ("chosen", "rejected"))
            if good is None or bad is None:
                return None
            prompt, (good, bad) = without_prompt(prompt, [good, bad])
            samples = [self._sample(prompt, good, True, row), self._sample(prompt, bad, False, row)]
            return [sample for sample in samples if sample is not None]
        answer = self._answers.said(row, "completion")
        if answer is None:
            return None
        if prompt is None:
            raise BadRow("there is no prompt", reason="no prompt")
        return self._sample(prompt, answer, _label(row, column("label")), row)

    def _sample(self, prompt: Said, answer: Said, label: bool, row: Row) -> Sample | None:
        own = self._answers.sample(prompt, answer, row)
        if own is None:
            return None
        other = next((said for asked, said in reversed(self._earlier) if asked != prompt), None)
        self._earlier.append((prompt, answer))
        foreign = self._answers.sample(prompt, other, row) if other is not None else None
        documents = [own] if foreign is None or not foreign.weights.any() else [own, foreign]
        return Sample.join(documents, meta={"label": label})


class PromptFormat:
    """Rows of `prompt` (text or messages) or of `messages` alone, up to where an answer begins; nothing trains.

    The row is kept in `Sample.meta` for functions that judge answers, its prompt under `prompt`.
    """

    kind: Kind = "prompts"

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        self._answers = Answers(tokenizer, source, ("prompt", "system"))
        self.remarks = self._answers.remarks

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end what the model says."""
        return self._answers.stop_ids

    def __call__(self, row: Row) -> Samples:
        names = (self._answers.source.columns.get("prompt"), *PROMPTS, *MESSAGE_COLUMNS)
        name = next((name for name in names if name is not None and name in row), "prompt")
        found = self._answers.said({**row, "prompt": row[name]} if name in row else row, "prompt")
        if found is None:
            return None
        ids = np.array(self._answers.prompt_ids(found, row), np.int64)
        if not len(ids):
            return None
        taken = next((key for key in SAMPLED if key in row and key != name), None)
        if taken is not None:
            what = f"column {taken!r} has the name of what is sampled, and would never reach a reward function"
            raise BadRow(
                what, reason=f"column {taken!r}, a name of what is sampled", remedy="rename it, or take it out"
            )
        kept = {**{key: value for key, value in row.items() if key != name}, "prompt": found}
        try:
            json.dumps(kept, allow_nan=False)
        except (TypeError, ValueError) as error:
            what = f"a column holds what JSON cannot ({error})"
            raise BadRow(what, reason="columns that JSON cannot hold") from None
        targets = np.append(ids[1:], NO_TOKEN)
        return Sample(ids, targets, np.zeros(len(ids), np.float32), meta=kept)


def _label(row: Row, column: str) -> bool:
    if column not in row:
        raise BadRow(f"there is no column {column!r}", reason=f"column {column!r} is missing")
    value: Any = row[column]
    words = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise BadRow(f"the label is {value!r}, neither true nor false", reason="labels that are neither true nor false")
    return found
