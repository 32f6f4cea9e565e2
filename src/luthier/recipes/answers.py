"""What a model answers to held-out rows, measured and side by side with another's: `luthier evaluate --metrics`.

The question of a row is all that stands before what it trains on last, and that is the answer which is expected: so it
is with every format, and a model is asked exactly as it was trained.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from luthier.batch import ASKED, Sample
from luthier.config import GenerationConfig
from luthier.data.loader import Rows
from luthier.data.report import EXAMPLES
from luthier.errors import DataError, UserError
from luthier.own_code import own_code, told_of
from luthier.recipes.answer_metrics import Metric
from luthier.recipes.generate import stops_of
from luthier.report.progress import stage
from luthier.sampling.engine import SLOTS, SamplingEngine
from luthier.sampling.request import SamplingRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out row as a question.

    Attributes:
        ids: what the model reads.
        prompt: the same as text, control tokens included.
        expected: the row's own answer.
        origin: file and line.
    """

    ids: tuple[int, ...]
    prompt: str
    expected: str
    origin: str


def questions_of(rows: Rows, tokenizer: Any) -> list[Question]:
    """The rows that have a question, as questions; those without one are counted in the log.

    Raises:
        DataError: none has: rows of plain text are trained on from their first token.
    """
    found = []
    without: list[str] = []
    for number in range(len(rows)):
        sample = rows[number]
        span = _last_trained(sample)
        if span is None or (span[0] == 0 and ASKED not in sample.meta):
            without.append(sample.origin)
            continue
        start, stop = span
        ids = tuple(int(token) for token in sample.tokens[: start + 1])
        answer = [int(token) for token in sample.targets[start:stop]]
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        found.append(Question(ids, str(tokenizer.decode(ids)), text, sample.origin))
    if not found:
        raise DataError(
            "no row has a question before what is trained on",
            where="data.validation",
            remedy="give rows with a prompt and an answer, and train_on_input: false",
        )
    if without:
        what = "%d of %d rows are not asked, without a question before what is trained on: %s%s"
        more = ", ..." if len(without) > EXAMPLES else ""
        logger.warning(what, len(without), len(rows), ", ".join(without[:EXAMPLES]), more)
    return found


def _last_trained(sample: Sample) -> tuple[int, int] | None:
    """[first, one past the last) of the last run of positions that are trained on."""
    trained = np.flatnonzero(sample.weights)
    if not len(trained):
        return None
    breaks = np.flatnonzero(np.diff(trained) > 1)
    first = trained[breaks[-1] + 1] if len(breaks) else trained[0]
    return int(first), int(trained[-1]) + 1


def answers_to(
    model: Any, tokenizer: Any, questions: Sequence[Question], config: GenerationConfig, *, seed: int, title: str
) -> list[str]:
    """A model's answers, several at a time; question i is sampled by seed + i."""
    stops = stops_of(model, tokenizer)
    engine = SamplingEngine(model, slots=max(1, min(SLOTS, len(questions))), stop_token_ids=stops)
    numbers = {}
    for index, question in enumerate(questions):
        request = SamplingRequest(
            question.ids,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=seed + index,
        )
        numbers[engine.submit(request)] = index
    found = [""] * len(questions)
    with stage(title) as told:
        done = 0
        while engine.busy:
            for number in engine.step():
                tokens = engine.result(number).tokens
                kept = tokens[:-1] if tokens and tokens[-1] in stops else tokens
                found[numbers[number]] = str(tokenizer.decode(kept, skip_special_tokens=True)).strip()
                done += 1
                told(done, len(questions))
    return found


def _failed(name: str, origin: str, error: BaseException) -> UserError:
    return UserError(f"{name} fails at {origin}: it {told_of(error)}", where="--metrics", remedy="mend the function")


def measured(
    metrics: Mapping[str, Metric], questions: Sequence[Question], answers: Sequence[str]
) -> dict[str, list[float]]:
    """Metric -> a number for each answer.

    Raises:
        UserError: a metric of one's own fails or gives no finite number; it and the row are named.
    """
    found: dict[str, list[float]] = {}
    for name, metric in metrics.items():
        values = []
        for question, answer in zip(questions, answers, strict=True):
            with own_code(partial(_failed, name, question.origin)):
                value = metric(answer, question.expected)
            if not math.isfinite(value):
                what = f"{name} gives {value} at {question.origin}"
                raise UserError(what, where="--metrics", remedy="give a finite number for each answer")
            values.append(value)
        found[name] = values
    return found
