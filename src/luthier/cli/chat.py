"""`luthier chat`."""

from __future__ import annotations

import sys

from luthier.cli.frame import (
    AdapterOption,
    Answer,
    Arguments,
    JsonOption,
    ModelOption,
    importing,
    run_config,
    typed,
    verb,
)

app = verb("chat")


@app.command()
def chat(
    arguments: Arguments = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Talk with a model, a line at a time; an empty line or the end of the input ends the talk."""
    config = run_config(arguments, model=model, defaults={"data": {}})
    with importing():
        from luthier.recipes.generate import open_chat

    reply = open_chat(config, adapter=adapter)
    messages: list[dict[str, str]] = []
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        pieces = []
        for piece in reply(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})
    return Answer({"messages": messages}, [])


def _read_line() -> str:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return typed(sys.stdin.readline, "standard input")
