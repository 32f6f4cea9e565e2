"""What a chat template leaves out of a conversation without a word, told by marks that have to come out of it again.

Looking for the text itself does not tell: an answer of a tool that is `42` also stands in a sentence about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luthier.data.formats.messages import REASONING
from luthier.data.report import BadRow

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Lost:
    """What is not in a rendering.

    Attributes:
        contents: numbers of the messages whose content is not.
        calls: (message, tool call), both counted from 0.
        reasoning: (message, key).
    """

    contents: list[int] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    reasoning: list[tuple[int, str]] = field(default_factory=list)


def lost_in(text: str, render: Render, messages: Sequence[Message]) -> Lost:
    """What the rendering of a conversation leaves out.

    One rendering with a mark at the end of everything tells for almost all rows. A mark that is missing, since the
    template trims or reads what is marked, proves nothing yet: the thing itself is then changed, or taken away.

    Args:
        text: the rendering.
        render: messages to text; raises BadRow where the template refuses them.
        messages: the conversation, as the template takes it.
    """
    try:
        marked = render([_marked(message, number) for number, message in enumerate(messages)])
    except BadRow:
        marked = ""  # a template that looks into what is said

    def same(number: int, **changed: Any) -> bool:
        other = {**messages[number], **changed}
        try:
            return render([*messages[:number], other, *messages[number + 1 :]]) == text
        except BadRow:
            return False  # a template that insists on it does not lose it

    lost = Lost()
    for number, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, str) and content.strip() and _mark(number, "content") not in marked:
            other = "Q" if content.lstrip()[:1] != "Q" else "Z"
            if same(number, content=other + _mark(number, "content")):
                lost.contents.append(number)
        for place in range(len(calls)):
            # a null content would be another reason for another text
            fewer = {"tool_calls": [*calls[:place], *calls[place + 1 :]], "content": content or ""}
            if _mark(number, f"call{place}") not in marked and same(number, **fewer):
                lost.calls.append((number, place))
        lost.reasoning.extend(
            (number, key)
            for key in REASONING
            if message.get(key) and _mark(number, key) not in marked and same(number, **{key: ""})
        )
    return lost


def _mark(number: int, of: str) -> str:
    return f"Zq7x{number}{of}q"


def _marked(message: Message, number: int) -> dict[str, Any]:
    marked = dict(message)
    for key in ("content", *REASONING):
        if isinstance(message.get(key), str) and message[key].strip():
            marked[key] = message[key] + _mark(number, key)
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            _marked_call(call, _mark(number, f"call{place}")) for place, call in enumerate(message["tool_calls"])
        ]
    return marked


def _marked_call(call: Message, mark: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _marked_call(call["function"], mark)}
    return {**call, "name": f"{call.get('name')}{mark}"}
