"""Format `prompt`: what the model is asked, with no answer; whatever else a row has is for the rewards."""

from __future__ import annotations

from typing import Any

from luthier.batch import Sample
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, Samples, text_of
from luthier.data.formats.chat import with_system
from luthier.data.formats.messages import message_weights, read_messages, read_tools
from luthier.data.report import BadRow
from luthier.hf.render import Encoder, Tokenizer
from luthier.hf.tokenizer import render

COLUMN = "prompt"


class PromptFormat:
    """Rows with a prompt: text to go on with, or messages, which the chat template renders up to where answers begin.

    Every token of a prompt has the weight 1, though none trains: the answers are made while training.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._source = source

    def __call__(self, row: Row) -> Samples:
        column = self._source.column or COLUMN
        prompt = prompt_of(row, self._source)
        if prompt is None:
            return None
        if isinstance(prompt, str):
            ids = self._encoder.encode_document(prompt)
        else:
            ids = render(
                self._tokenizer,
                prompt,
                tools=read_tools(row.get("tools"), "tools"),
                add_generation_prompt=True,
            )
        if len(ids) < 2:
            raise BadRow(f"column {column!r} holds a single token", reason="a prompt of one token")
        return Sample.from_ids(ids, [1.0] * len(ids))


def prompt_of(row: Row, source: SourceConfig) -> str | list[dict[str, Any]] | None:
    """The prompt of a row as it is given to rewards: text or messages; None for an empty one.

    Raises:
        BadRow: there is none.
    """
    column = source.column or COLUMN
    if not isinstance(row.get(column), list):
        text = text_of(row, column)
        if text is None or not source.system_prompt:
            return text
        return with_system([{"role": "user", "content": text}], source.system_prompt)
    messages = read_messages(row[column], column)
    message_weights(messages)
    return with_system(messages, source.system_prompt) if messages else None
