"""Formats `preference` and `ranked`: pairs of answers to a prompt, of which the first is preferred.

A row becomes one sample that holds both answers end to end, each with the prompt in front (`Sample.parts`): a pair is
packed, cached, counted and resumed as one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from luthier.batch import Sample
from luthier.config.kinds import Kind
from luthier.config.sections import SourceConfig
from luthier.data.formats.answers import Answers, Said, begins_trained, pair, said, without_prompt
from luthier.data.formats.base import Row, Samples
from luthier.data.report import BadRow
from luthier.errors import ConfigError
from luthier.hf.render import Tokenizer

PROMPTS = ("prompt", "instruction", "question")
"""Columns that a prompt may stand in."""
LISTS = ("completions", "responses", "answers")
SCORES = ("scores", "ratings")
RANKS = ("ranks", "rankings", "rank")
_TEXTS = ("response", "completion", "content", "text", "answer")
_SCORE_KEYS = ("score", "overall_score", "rating", *RANKS)
ALIKE = "whose two answers are alike"


class _Compared:
    """What both formats share: pairs out of prompts and answers."""

    kind: Kind = "pairs"
    fields: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        self._answers = Answers(tokenizer, source, self.fields)
        self.remarks = self._answers.remarks

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end what the model says."""
        return self._answers.stop_ids

    def _prompt(self, row: Row) -> Said | None:
        """What the prompt's column says, if there is one; None means that the answers repeat it."""
        mapped = self._answers.source.columns
        name = next((name for name in PROMPTS if name in row), None) if "prompt" not in mapped else mapped["prompt"]
        if name is None:
            return None
        found = said(row.get(name), name)
        if name not in row:
            raise BadRow(f"there is no column {name!r}", reason=f"column {name!r} is missing")
        return found

    def _pair(self, prompt: Said, better: Said, worse: Said, row: Row) -> Sample | None:
        chosen, rejected = (self._answers.sample(prompt, answer, row) for answer in (better, worse))
        if chosen is None or rejected is None:
            return None
        if better == worse:
            self.remarks[ALIKE] += 1
        return pair(chosen, rejected, begin_alike=begins_trained(better) and begins_trained(worse))


class PreferenceFormat(_Compared):
    """Rows of `chosen` and `rejected`, and `prompt` unless both begin with it: text, or messages. A number `margin`, by
    how much the first is better, goes with them; it may be text, and an empty one is none."""

    fields = ("prompt", "chosen", "rejected", "system")

    def __call__(self, row: Row) -> Samples:
        sides = [self._answers.said(row, name) for name in ("chosen", "rejected")]
        better, worse = sides
        if better is None or worse is None:
            return None
        prompt, (better, worse) = without_prompt(self._prompt(row), [better, worse])
        made = self._pair(prompt, better, worse, row)
        margin = margin_of(row.get("margin"))
        return made if made is None or margin is None else replace(made, meta={**made.meta, "margin": margin})


class RankedFormat(_Compared):
    """Rows of a prompt and a list of answers with scores (more is better) or ranks (1 is best).

    The answers stand in `completions`, `responses` or `answers`, as text or messages, or as objects that hold text and
    score. They become pairs: of the best against the worst, or with `options.pairs: all` every two that differ in
    score. Answers of one score make no pair, and a row whose answers all have one score none at all.
    """

    fields = ("prompt", "completions", "scores", "ranks", "system")

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        super().__init__(tokenizer, source)
        self._every = source.options.get("pairs", "best_worst")
        if self._every not in ("best_worst", "all"):
            raise ConfigError(f"{self._every!r} is neither best_worst nor all", where="data.*.options.pairs")

    def __call__(self, row: Row) -> Samples:
        answers, scores = self._ranked(row)
        order = sorted(range(len(answers)), key=lambda place: -scores[place])
        wanted = combinations(order, 2) if self._every == "all" else [(order[0], order[-1])] if len(order) > 1 else []
        chosen = [(high, low) for high, low in wanted if scores[high] > scores[low]]
        if not chosen:
            return None
        prompt, answers = without_prompt(self._prompt(row), answers)
        made = [self._pair(prompt, answers[high], answers[low], row) for high, low in chosen]
        return [sample for sample in made if sample is not None]

    def _ranked(self, row: Row) -> tuple[list[Said], list[float]]:
        """Answers that say something, and the score of each, more being better."""
        name = self._first(row, "completions", LISTS)
        listed = row[name]
        if not isinstance(listed, list):
            raise BadRow(f"column {name!r} holds no list of answers", reason=f"column {name!r} is no list")
        scores, sign = self._scores(row, listed)
        if len(scores) != len(listed):
            what = f"there are {len(listed)} answers and {len(scores)} scores"
            raise BadRow(what, reason="answers and scores do not match")
        texts = [_text(answer, name) for answer in listed]
        kept = [(text, sign * _number(score)) for text, score in zip(texts, scores, strict=True) if text is not None]
        return [text for text, _ in kept], [score for _, score in kept]

    def _scores(self, row: Row, listed: list[Any]) -> tuple[list[Any], float]:
        for field, names, sign in (("scores", SCORES, 1.0), ("ranks", RANKS, -1.0)):
            mapped = self._answers.source.columns.get(field)
            found = next((name for name in ((mapped,) if mapped else names) if isinstance(row.get(name), list)), None)
            if found is not None:
                return row[found], sign
        if all(isinstance(answer, Mapping) for answer in listed):
            for key in _SCORE_KEYS:
                if all(key in answer for answer in listed):
                    return [answer[key] for answer in listed], -1.0 if key in RANKS else 1.0
        known = ", ".join((*SCORES, *RANKS))
        raise BadRow(f"no column says how good each answer is ({known})", reason="no scores")

    def _first(self, row: Row, field: str, names: tuple[str, ...]) -> str:
        mapped = self._answers.source.columns.get(field)
        found = next((name for name in ((mapped,) if mapped else names) if name in row), None)
        if found is None:
            seen = ", ".join(str(key) for key in row) or "none"
            raise BadRow(f"there is no column of answers ({', '.join(names)}; columns: {seen})", reason="no answers")
        return found


def _text(answer: Any, column: str) -> Said | None:
    if isinstance(answer, Mapping) and "role" not in answer:
        key = next((key for key in _TEXTS if key in answer), None)
        if key is None:
            what = f"an answer of column {column!r} has no text (keys: {', '.join(map(str, answer))})"
            raise BadRow(what, reason="answers without text")
        return said(answer[key], f"{column}.{key}")
    return said([answer] if isinstance(answer, Mapping) else answer, column)


def margin_of(value: Any) -> float | None:
    """By how much the first answer of a pair is better; None where the row does not say.

    Raises:
        BadRow: it says something that is no number.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        what = f"the margin is {value!r}, which is no number"
        raise BadRow(what, reason="margins that are no numbers", remedy="give a number, or no margin")
    return found


def _number(score: Any) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(score, bool) or math.isnan(value):
        raise BadRow(f"a score is {score!r}, which is no number", reason="scores that are no numbers")
    return value
