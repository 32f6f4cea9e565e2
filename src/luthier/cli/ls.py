"""`luthier ls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from luthier.cli.frame import Answer, JsonOption, verb
from luthier.jobs.catalogue import recipes, selections

app = verb("ls")


@app.command()
def ls(
    pattern: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only names with this in them.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """List recipes, and the configs of the catalogue that each takes."""
    wanted = pattern.lower() if pattern is not None else ""
    table = {
        recipe: [
            selection.config
            for selection in selections()
            if selection.recipe == recipe and (wanted in selection.config or wanted in recipe)
        ]
        for recipe in recipes()
    }
    return Answer({"recipes": table}, _lines(table))


def _lines(table: dict[str, list[str]]) -> Iterator[str]:
    yield f"{'RECIPE':<32}CONFIG"
    for recipe, configs in table.items():
        for number, config in enumerate(configs):
            yield f"{'' if number else recipe:<32}{config}"
