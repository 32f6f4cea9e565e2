"""`luthier data show`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from luthier.cli.frame import Answer, Arguments, DataOption, JsonOption, ModelOption, importing, run_config, verb

app = verb("data")


@app.callback(help="Look at rows as the model sees them.")
def _data() -> None:
    pass


@app.command()
def show(
    arguments: Arguments = None,
    model: ModelOption = None,
    data: DataOption = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows to show.")] = 3,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Which rows to show.")] = "train",
    as_json: JsonOption = False,
) -> Answer:
    """Print rows token by token, the trained tokens in colour, and how many there are of each."""
    config = run_config(arguments, model=model, data=data)
    with importing():
        from luthier.recipes.show import show

    result, lines = show(config, rows=rows, split=split)
    return Answer(result, lines)
