"""Answers to a prompt: what formats `preference`, `ranked`, `unpaired` and `prompt` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from luthier.batch import Sample
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, plain_sample
from luthier.data.formats.chat import Conversations, with_system
from luthier.data.formats.messages import message_weights, read_messages, read_tools, says_something
from luthier.data.report import BadRow
from luthier.errors import ConfigError
from luthier.hf.render import Encoder, Tokenizer

Messages = list[dict[str, Any]]
Said = str | Messages
"""A prompt or an answer, as text or as messages."""


class Answers:
    """Renders answers to prompts.

    Text is one text with its prompt, as format `instruct` has it; messages go through the chat template, and text
    beside messages is a user's or an assistant's turn.

    Attributes:
        encoder: the tokenizer.
        source: the source.
        remarks: what is worth knowing about rows.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig, fields: Collection[str]) -> None:
        unknown = sorted(set(source.columns) - set(fields))
        if unknown:
            known = ", ".join(fields)
            raise ConfigError(f"there is no field {unknown[0]!r}", where="data.*.columns", remedy=f"there are {known}")
        if source.train_on_input:
            what = "what the model is given does not train where answers are compared"
            raise ConfigError(what, where="data.*.train_on_input", remedy="leave it out")
        template = source.options.get("template")
        if template not in (None, "chat", "plain"):
            raise ConfigError(f"{template!r} is neither chat nor plain", where="data.*.options.template")
        self._by_chat = template == "chat"
        self._tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.source = source
        self.remarks: Counter[str] = Counter()
        self._turns: Conversations | None = None
        if self._by_chat:
            self.turns  # noqa: B018  (without a chat template this is refused before any row is read)

    @property
    def turns(self) -> Conversations:
        """The chat template, asked for when first needed."""
        if self._turns is None:
            self._turns = Conversations(self._tokenizer)
            self._turns.remarks = self.remarks
        return self._turns

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end what the model says."""
        if self._turns is not None and self._turns.stop_ids:
            return set(self._turns.stop_ids)
        return set() if self.encoder.eos is None else {self.encoder.eos}

    def column(self, field: str) -> str:
        return self.source.columns.get(field, field)

    def said(self, row: Row, field: str) -> Said | None:
        """What a column says; None where it is empty.

        Raises:
            BadRow: there is no such column, or it holds neither text nor messages.
        """
        name = self.column(field)
        if name not in row:
            seen = ", ".join(str(key) for key in row) or "none"
            raise BadRow(f"there is no column {name!r} (columns: {seen})", reason=f"column {name!r} is missing")
        return said(row[name], name)

    def sample(self, prompt: Said, answer: Said, row: Row) -> Sample | None:
        """A prompt with an answer, which trains; None for an answer that says nothing.

        Raises:
            BadRow: it cannot be rendered.
        """
        system = self._system(row)
        if isinstance(prompt, str) and isinstance(answer, str) and not self._by_chat:
            head = f"{system}\n\n" if system else ""
            return plain_sample(self.encoder, head + prompt, answer, False) if answer.strip() else None
        before, after = as_turns(prompt, "user"), as_turns(answer, "assistant")
        message_weights(before)
        weights = [0.0] * len(before) + message_weights(after)
        messages = with_system([*before, *after], system)
        return self.turns.sample(messages, read_tools(row.get("tools"), "tools"), weights, False)

    def prompt_ids(self, prompt: Said, row: Row) -> list[int]:
        """The tokens of a prompt, up to where an answer begins."""
        system = self._system(row)
        if isinstance(prompt, str) and not self._by_chat:
            return self.encoder.encode_document(f"{system}\n\n{prompt}" if system else prompt)
        messages = with_system(as_turns(prompt, "user"), system)
        return self.turns.prompt_ids(messages, read_tools(row.get("tools"), "tools"))

    def _system(self, row: Row) -> str | None:
        own = row.get(self.column("system"))
        return (own if isinstance(own, str) and own.strip() else None) or self.source.system_prompt


def said(value: Any, column: str) -> Said | None:
    """Text or messages of a column; None where it is null, white space or an empty list.

    Raises:
        BadRow: it holds something else.
    """
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, list):
        return read_messages(value, column) or None
    if value is None:
        return None
    kind = type(value).__name__
    raise BadRow(f"column {column!r} holds {kind}, neither text nor messages", reason=f"column {column!r} is no text")


def as_turns(value: Said, role: str) -> Messages:
    """Messages; text becomes one turn."""
    return [{"role": role, "content": value}] if isinstance(value, str) else [dict(message) for message in value]


def without_prompt(prompt: Said | None, answers: Sequence[Said]) -> tuple[Said, list[Said]]:
    """The prompt, and answers that no longer repeat it.

    Data sets of the Hub often write whole conversations into every answer: what all of these begin with, but for the
    last turn of the shortest, is the prompt, and a column `prompt` beside them says the same again.

    Args:
        prompt: of its column; None where there is none.
        answers: all to the one prompt.

    Raises:
        BadRow: there is no prompt column, and the answers do not begin alike.
    """
    if prompt is not None and not all(isinstance(answer, list) for answer in answers):
        return prompt, list(answers)
    if all(isinstance(answer, list) for answer in answers):
        conversations = [answer for answer in answers if isinstance(answer, list)]
        most = min(len(turns) for turns in conversations) - 1
        shared = 0
        while shared < most and all(turns[shared] == conversations[0][shared] for turns in conversations):
            shared += 1
        repeated = conversations[0][:shared]
        if prompt is not None and (not repeated or all(turn["role"] == "assistant" for turn in repeated)):
            return prompt, list(answers)
        if repeated:
            # a system turn or earlier ones may stand in the column alone
            if isinstance(prompt, list) and len(prompt) > len(repeated):
                repeated = prompt
            return repeated, [turns[shared:] for turns in conversations]
    elif all(isinstance(answer, str) for answer in answers):
        texts = [answer for answer in answers if isinstance(answer, str)]
        size = _alike(texts)
        if size:
            return texts[0][:size], [text[size:] for text in texts]
    raise BadRow("there is no prompt: no column of this name, and the answers do not begin alike", reason="no prompt")


def _alike(texts: Sequence[str]) -> int:
    """How many characters texts begin with alike; a space before the first that differs is the answers'."""
    size = 0
    for characters in zip(*texts, strict=False):
        if len(set(characters)) > 1:
            break
        size += 1
    return size - 1 if size and texts[0][size - 1] == " " else size


def pair(chosen: Sample, rejected: Sample, *, begin_alike: bool = True) -> Sample | None:
    """A row of two answers to one prompt, the preferred one first. Both train from where the ids of prompt and answer
    part in either, so that tokens which merge across the border count on both sides or on none.

    Args:
        chosen: the prompt with the preferred answer.
        rejected: the prompt with the other.
        begin_alike: whether both train from where the prompt ends (`begins_trained`). Of other answers each trains what
            it is marked with: what lies before that is theirs, and not to be trained.

    Returns:
        None where an answer has no trained token.
    """
    if not chosen.weights.any() or not rejected.weights.any():
        return None
    first = [int(np.flatnonzero(sample.weights)[0]) for sample in (chosen, rejected)]
    start = min(first)
    sides = []
    for sample, begin in zip((chosen, rejected), first, strict=True):
        weights = sample.weights.copy()
        if begin_alike:
            weights[start:begin] = weights[begin]
        sides.append(Sample(sample.tokens, sample.targets, weights))
    return Sample.join(sides)


def begins_trained(answer: Said) -> bool:
    """Whether an answer trains from its very beginning: text does, messages where the first of them is trained on."""
    if isinstance(answer, str):
        return True
    first = answer[0]
    return first["role"] == "assistant" and first.get("weight") != 0 and says_something(first)
