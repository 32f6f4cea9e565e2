"""Format `instruct`: a task and its answer, as Alpaca columns or as prompt and completion."""

from __future__ import annotations

from collections import Counter
from typing import Any

from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, Samples, plain_sample, text_of
from luthier.data.formats.chat import Conversations, with_system
from luthier.data.formats.messages import message_weights, read_messages, read_tools
from luthier.data.report import BadRow
from luthier.errors import ConfigError
from luthier.hf.render import Tokenizer
from luthier.hf.tokenizer import chat_template_of
from luthier.hf.vision.sight import encoder_of

FIELDS = ("instruction", "input", "output", "prompt", "completion", "system")
PAIRS = (("prompt", "completion"), ("instruction", "output"))
"""Columns that a row needs: one of these pairs, by these names or mapped to them."""
ALIASES = {
    ("prompt", "response"): ("prompt", "completion"),
    ("question", "answer"): ("prompt", "completion"),
    ("instruction", "response"): ("instruction", "output"),
}
"""Other pairs that are told from the columns."""
TEMPLATES = ("chat", "plain")


class InstructFormat:
    """Rows of (instruction, input, output) or (prompt, completion).

    `options.template` says how they are laid out. "chat": as a user and an assistant turn of the chat template.
    "plain": prompt and completion as one text. Left out: Alpaca columns go through the chat template if there is
    one, and prompt and completion stay plain, since they usually bring their own markers.

    Raises:
        UserError: a column map or an option that makes no sense, or no chat template where one is asked for.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        unknown = sorted(set(source.columns) - set(FIELDS))
        if unknown:
            known = ", ".join(FIELDS)
            raise ConfigError(f"there is no field {unknown[0]!r}", where="data.*.columns", remedy=f"there are {known}")
        template = source.options.get("template")
        if template not in (None, *TEMPLATES):
            raise ConfigError(f"{template!r} is neither chat nor plain", where="data.*.options.template")
        self._template = template
        self._tokenizer = tokenizer
        self._encoder = encoder_of(tokenizer)
        self._source = source
        self._turns: Conversations | None = None
        self.remarks: Counter[str] = Counter()
        self._by_chat = template == "chat" or (template is None and chat_template_of(tokenizer) is not None)
        if template == "chat":
            # without a chat template this is refused before any row is read
            self._conversations()

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end what the model says."""
        if self._turns is not None and self._turns.stop_ids:
            return set(self._turns.stop_ids)
        return set() if self._encoder.eos is None else {self._encoder.eos}

    def __call__(self, row: Row) -> Samples:
        asked, answered = self._pair(row)
        if isinstance(row.get("history"), list) and row["history"] and "history" not in self._source.columns.values():
            raise BadRow(
                "column 'history' holds earlier turns, which format instruct has no place for",
                reason="earlier turns that would be lost",
                remedy="write the conversation as messages (format chat), or take the column out",
            )
        if isinstance(row.get(asked), list) or isinstance(row.get(answered), list):
            return self._conversational(row, asked, answered)
        answer = text_of(row, answered)
        task = text_of(row, asked)
        system = self._system(row)
        if answer is None or (task is None and row[asked] is None):
            return None
        if self._fields(row) == PAIRS[0]:
            return self._prompt_completion(row[asked], row[answered], system)
        extra = self._column("input")
        if extra not in row and (asked, answered) == ("instruction", "response"):
            extra = "context"  # as Dolly has it
        given = text_of(row, extra) if extra in row else None
        return self._alpaca(task or "", given, row[answered], system)

    def _prompt_completion(self, prompt: str, completion: str, system: str | None) -> Samples:
        if self._template == "chat":
            return self._chat(prompt, completion, system)
        head = f"{system}\n\n" if system else ""
        return plain_sample(self._encoder, head + prompt, completion, self._source.train_on_input)

    def _alpaca(self, task: str, given: str | None, answer: str, system: str | None) -> Samples:
        if self._by_chat:
            return self._chat(f"{task}\n\n{given}" if given else task, answer, system)
        parts = [system] if system else []
        parts.append(f"### Instruction:\n{task}")
        if given:
            parts.append(f"### Input:\n{given}")
        prompt = "\n\n".join([*parts, "### Response:\n"])
        return plain_sample(self._encoder, prompt, answer, self._source.train_on_input)

    def _chat(self, prompt: str, answer: str, system: str | None) -> Samples:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return self._conversations().sample(with_system(turns, system), None, [1.0, 1.0], self._source.train_on_input)

    def _conversational(self, row: Row, asked: str, answered: str) -> Samples:
        """Prompt and completion as lists of messages: the turns of the completion train."""
        if answered not in row or asked not in row:
            raise _missing(row, answered if answered not in row else asked)
        before, after = (
            [{"role": role, "content": row[name]}] if isinstance(row[name], str) else read_messages(row[name], name)
            for name, role in ((asked, "user"), (answered, "assistant"))
        )
        message_weights(before)
        weights = [0.0] * len(before) + message_weights(after)
        messages = with_system([*before, *after], self._system(row))
        tools = read_tools(row.get("tools"), "tools")
        if not after:
            return None
        return self._conversations().sample(messages, tools, weights, self._source.train_on_input)

    def _conversations(self) -> Conversations:
        if self._turns is None:
            self._turns = Conversations(self._tokenizer)
            self._turns.remarks = self.remarks
        return self._turns

    def _pair(self, row: Row) -> tuple[str, str]:
        first, second = self._fields(row)
        if first in self._source.columns or second in self._source.columns:
            return self._column(first), self._column(second)
        if first in row and second in row:
            return first, second
        for names, fields in ALIASES.items():
            if fields == (first, second) and all(name in row for name in names):
                return names
        return first, second

    def _fields(self, row: Row) -> tuple[str, str]:
        """Which of the two pairs the source has, by its column map, else by the columns of the row."""
        mapped = self._source.columns
        for pair in PAIRS:
            if any(name in mapped for name in pair):
                return pair
        if any(name in row for name in ("instruction", "output")):
            return PAIRS[1]
        return PAIRS[0]

    def _column(self, field: str) -> str:
        return self._source.columns.get(field, field)

    def _system(self, row: Row) -> str | None:
        column = self._column("system")
        own: Any = text_of(row, column) if column in row else None
        return own or self._source.system_prompt


def _missing(row: Row, column: str) -> BadRow:
    seen = ", ".join(str(name) for name in row) or "none"
    return BadRow(f"there is no column {column!r} (columns: {seen})", reason=f"column {column!r} is missing")
