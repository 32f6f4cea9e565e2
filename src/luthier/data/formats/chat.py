"""Format `chat`: conversations, rendered by the chat template; assistant turns train, with the tokens that end them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from luthier.batch import Sample
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, Samples
from luthier.data.formats.lost import Lost, lost_in
from luthier.data.formats.messages import (
    message_weights,
    read_functions,
    read_messages,
    read_tools,
    says_something,
)
from luthier.data.mask import Masker
from luthier.data.report import BadRow
from luthier.hf.render import Tokenizer
from luthier.hf.vision.sight import encoder_of

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")


class ChatFormat:
    """Rows with a list of messages, and perhaps a column `tools`.

    Raises:
        UserError: the tokenizer has no chat template, or one that ends no turn.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        self._turns = Conversations(tokenizer)
        self._source = source
        self.stop_ids = self._turns.stop_ids
        self.remarks = self._turns.remarks

    def __call__(self, row: Row) -> Samples:
        filled = [name for name in MESSAGE_COLUMNS if row.get(name)]
        if self._source.column is None and len(filled) > 1:
            raise BadRow(
                f"columns {' and '.join(map(repr, filled))} both hold messages",
                reason="messages in more than one column",
                remedy="say which with data.*.column",
            )
        found = filled or [name for name in MESSAGE_COLUMNS if name in row] or ["messages"]
        column = self._source.column or found[0]
        if column not in row:
            seen = ", ".join(str(name) for name in row) or "none"
            raise BadRow(f"there is no column {column!r} (columns: {seen})", reason=f"column {column!r} is missing")
        messages = read_messages(row[column], column)
        tools = read_tools(row.get("tools"), "tools") or read_functions(row.get("functions"), "functions")
        return self._turns.sample(
            with_system(messages, row.get("system") or self._source.system_prompt),
            tools,
            message_weights(messages),
            self._source.train_on_input,
        )


class Conversations:
    """Messages to samples: what formats `chat` and `instruct` share.

    Attributes:
        stop_ids: the token that ends turns, and those that ended trained turns so far.
        remarks: roles whose text the template leaves out or changes -> rows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._masker = Masker(encoder_of(tokenizer))
        self.stop_ids: set[int] = set(self._masker.stops)
        self.remarks: Counter[str] = Counter()

    def sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        weights: Sequence[float],
        train_on_input: bool,
    ) -> Sample | None:
        """The sample of a conversation; None if no assistant says anything in it.

        Args:
            messages: the conversation; a system message that was put in front may be missing from `weights`.
            tools: tool descriptions for the template.
            weights: weight of each message, from the last one backwards.
            train_on_input: train on all turns.

        Raises:
            BadRow: it cannot be rendered, something of it would be lost, or the trained tokens cannot be told.
        """
        heard = [message for message in messages if message["role"] != "system"]
        silent = not any(says_something(message) for message in messages if message["role"] == "assistant")
        if not heard or (silent and any(message["role"] == "assistant" for message in messages)):
            return None
        shown = self._renderable(messages, tools)
        lost = self._lost(shown, tools)
        heard_turns = [
            {key: value for key, value in message.items() if (number, key) not in lost.reasoning}
            for number, message in enumerate(shown)
        ]
        counted = [1.0] * (len(messages) - len(weights)) + list(weights)
        # an assistant turn without a word would teach the model to stop at once
        counted = [
            0.0 if message["role"] == "assistant" and not says_something(message) else weight
            for message, weight in zip(heard_turns, counted, strict=True)
        ]
        masked = self._masker(shown, tools, counted, train_on_input)
        self.stop_ids |= masked.stops
        return Sample.from_ids(masked.ids, masked.weights) if len(masked.ids) > 1 else None

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[int]:
        """The ids of a conversation up to where the next answer begins, the header of the answer's turn included.

        Raises:
            BadRow: it cannot be rendered, or something of it would be lost.
        """
        shown = self._renderable(messages, tools)
        self._lost(shown, tools)
        return self._masker.prompt_ids(shown, tools)

    def _renderable(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> Sequence[Mapping[str, Any]]:
        """The messages as the template takes them: null contents null or empty, arguments of calls as objects or text.

        Raises:
            BadRow: the template takes them in no way.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        filled = [{**m, "content": ""} if m["content"] is None else m for m in messages]
        refused: BadRow | None = None
        for candidate in (messages, filled, _with_text_arguments(messages), _with_text_arguments(filled)):
            try:
                text = self._masker.text(candidate, tools)
                # some templates print the word None for a null content
                if candidate is messages and "None" in text and "None" not in self._masker.text(filled, tools):
                    continue
                return candidate
            except BadRow as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _lost(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> Lost:
        """What the template leaves out: reasoning and system messages, which are counted; of earlier turns most leave
        their reasoning out by design.

        Raises:
            BadRow: it leaves something else out.
        """
        text = self._masker.text(messages, tools)
        if tools and text == self._masker.text(messages, None):
            raise _left_out("tools", "tools")
        lost = lost_in(text, lambda shown: self._masker.text(shown, tools), messages)
        for number, place in lost.calls:
            alone = len(messages[number]["tool_calls"]) == 1
            raise _left_out("tool_calls" if alone else f"call {place + 1} of message {number + 1}", "tool_calls")
        roles = {messages[number]["role"] for number in lost.contents}
        for number in lost.contents:
            if messages[number]["role"] != "system":
                raise BadRow(
                    f"the chat template leaves out what message {number + 1} ({messages[number]['role']}) says",
                    reason="content that the chat template leaves out",
                    remedy="name a template that renders it (data.chat_template)",
                )
        for role in roles | self._masker.changed_content(messages, text):
            self.remarks[f"with {role} text that the chat template leaves out or changes"] += 1
        for _ in {number for number, _ in lost.reasoning}:
            self.remarks["with reasoning that the chat template leaves out"] += 1
        return lost


def with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """The messages with a system message in front, unless they have one or there is nothing to say.

    Raises:
        BadRow: the system prompt is no text.
    """
    if system is not None and not isinstance(system, str):
        raise BadRow("the system prompt is no text", reason="messages that cannot be read")
    if not system or not messages or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of tool calls as JSON text, which some templates paste in as it is."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        inner = dict(call.get("function", call))
        if not isinstance(inner.get("arguments", ""), str):
            inner["arguments"] = json.dumps(inner["arguments"], ensure_ascii=False)
        return {**call, "function": inner} if "function" in call else inner

    return [
        {**m, "tool_calls": [as_text(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages
    ]


def _left_out(what: str, kind: str) -> BadRow:
    return BadRow(
        f"the chat template does not render {what}, which would be lost",
        reason=f"{kind} that the chat template does not render",
        remedy="name a template that does (data.chat_template)",
    )
