"""Conversations as data sets write them, brought to one shape: role, content, and what else a template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luthier.data.report import BadRow
from luthier.data.sources.json_rows import json_value

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's and other names -> the role, in any case; any other name stays as it is."""
_ROLES = {"system", "user", "assistant", "tool", "function", "developer", "function_call"}
_SILENT = {"role", "from", "name", "weight", "id", "tool_call_id"}
"""Keys of a message that are nothing it says."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys that hold what the model thinks before it answers."""


def read_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a column, in `role` and `content`.

    Args:
        value: a list of messages (role/content, or from/value as ShareGPT has them), or the same as JSON text.
        column: its name, for messages.

    Raises:
        BadRow: it is no such list.
    """
    if isinstance(value, str):
        value = _from_json(value, column)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _bad(f"column {column!r} holds no list of messages")
    return [_message(item, number, column) for number, item in enumerate(value, start=1)]


def message_weights(messages: list[dict[str, Any]]) -> list[float]:
    """Takes `weight` out of the messages; 1 where there is none.

    Raises:
        BadRow: a weight is not 0 or 1, or another role than assistant is to be trained on.
    """
    weights = []
    for number, message in enumerate(messages, start=1):
        weight = message.pop("weight", None)
        if weight not in (None, 0, 1):
            raise _bad(f"message {number} has weight {weight!r}, which is neither 0 nor 1")
        if weight and message["role"] != "assistant":
            raise _bad(f"message {number} ({message['role']}) has weight 1, but only assistant messages are trained on")
        weights.append(1.0 if weight is None else float(weight))
    return weights


def says_something(message: Mapping[str, Any]) -> bool:
    """Whether an assistant message holds text, thinking or a tool call."""
    content = message.get("content")
    spoken = content.strip() if isinstance(content, str) else content
    return bool(spoken or message.get("tool_calls") or any(message.get(key) for key in REASONING))


def read_tools(value: Any, column: str) -> list[Any] | None:
    """Tool descriptions: a list, or a list as JSON text; None for none.

    Raises:
        BadRow: it is something else.
    """
    if isinstance(value, str):
        value = _from_json(value, column) if value.strip() else None
    if value is not None and not isinstance(value, list):
        raise _bad(f"column {column!r} holds no list of tools")
    return value or None


def read_functions(value: Any, column: str) -> list[Any] | None:
    """Functions, as OpenAI described them before there were tools, as tools.

    Raises:
        BadRow: it is something else.
    """
    functions = read_tools(value, column)
    return [{"type": "function", "function": function} for function in functions] if functions else None


def _message(item: Any, number: int, column: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _bad(f"message {number} of column {column!r} is no object with role and content")
    message = dict(item)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        raise _bad(f"message {number} of column {column!r} has no role (keys: {', '.join(map(str, item)) or 'none'})")
    folded = role.strip().casefold()
    message["role"] = ROLES.get(folded, folded if folded in _ROLES else role)
    _refuse_unknown_content(message, number, column)
    if message.get("function_call") is not None and not message.get("tool_calls"):
        # what OpenAI had before tool_calls
        call = message["function_call"]
        if not isinstance(call, Mapping) or "name" not in call:
            raise _bad(f"the function_call of message {number} has no name and arguments")
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    message.pop("function_call", None)
    if message["role"] == "function_call":
        message["role"] = "assistant"
        message["tool_calls"] = _calls_of_text(message.get("content"), number)
        message["content"] = None
    message["content"] = _content(message.get("content"), number, message["role"])
    if message.get("tool_calls") is None:
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _tool_calls(message["tool_calls"], number)
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message


def _refuse_unknown_content(message: Mapping[str, Any], number: int, column: str) -> None:
    """A message without `content` that says something under a name which no template reads would count as empty."""
    if "content" in message or any(message.get(key) for key in ("tool_calls", "function_call", *REASONING)):
        return
    others = [str(key) for key, value in message.items() if key not in _SILENT and value]
    if others:
        raise _bad(f"message {number} of column {column!r} has no content (keys: {', '.join(map(str, message))})")


def _content(content: Any, number: int, role: str) -> str | None:
    """Text; a list of text parts becomes one text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"message {number} ({role}) has content that is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise _bad(f"message {number} ({role}) has a part of type {kind!r}; only text can be trained on")
    return "".join(texts)


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise _bad(f"the tool_calls of message {number} are no list of objects")
    read = []
    for call in calls:
        call = dict(call)
        inner = call.get("function", call)
        if not isinstance(inner, Mapping):
            raise _bad(f"a tool call of message {number} has no function with name and arguments")
        inner = dict(inner)
        # OpenAI writes arguments as JSON text, templates print them as JSON: text would be quoted twice
        if isinstance(inner.get("arguments"), str):
            try:
                inner["arguments"] = json_value(inner["arguments"])
            except BadRow as fault:
                what = f"the arguments of a tool call of message {number} are not JSON"
                raise _bad(f"{what}: {_clause(fault)}") from fault
        read.append({**call, "function": inner} if "function" in call else inner)
    return read


def _calls_of_text(content: Any, number: int) -> list[dict[str, Any]]:
    call = _from_json(content, f"message {number}") if isinstance(content, str) else content
    calls = call if isinstance(call, list) else [call]
    if not all(isinstance(item, Mapping) and "name" in item for item in calls):
        raise _bad(f"message {number} (function_call) is no JSON with name and arguments")
    return [{"type": "function", "function": dict(item)} for item in calls]


def _from_json(text: str, column: str) -> Any:
    try:
        return json_value(text)
    except BadRow as fault:
        raise _bad(f"{column!r} holds text that is not JSON: {_clause(fault)}") from fault


def _clause(fault: BadRow) -> str:
    return fault.what.removeprefix("is not JSON: ")


def _bad(what: str) -> BadRow:
    return BadRow(what, reason="messages that cannot be read")
