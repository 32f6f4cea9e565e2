"""`luthier generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

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
from luthier.errors import UserError

app = verb("generate")

PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="What to answer; may be given several times. Else standard input."),
]


@app.command()
def generate(
    arguments: Arguments = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    prompt: PromptOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Answer prompts; `generation.temperature=0.7` and the like say how to sample."""
    config = run_config(arguments, model=model, defaults={"data": {}})
    prompts = prompt or [typed(sys.stdin.read, "standard input")]
    if not all(typed(text.strip, "--prompt") for text in prompts):
        raise UserError("there is nothing to answer", where="--prompt", remedy="give a text")
    with importing():
        from luthier.recipes.generate import generate

    result = generate(config, prompts, adapter=adapter)
    return Answer(result, [answer["text"] for answer in result["answers"]])
