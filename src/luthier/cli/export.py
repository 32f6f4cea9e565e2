"""`luthier export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from luthier.cli.frame import Answer, JsonOption, importing, verb
from luthier.errors import UserError

app = verb("export")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output directory of a luthier train.")],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where to write.")],
    step: Annotated[int | None, typer.Option(min=0, help="Which checkpoint; the newest when left out.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="A whole model, the adapters added to its weights.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="PEFT files of the adapters alone.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Write what a run has trained as a directory that plain Transformers (or PEFT) opens."""
    if merge and adapter:
        raise UserError("--merge and --adapter exclude each other", remedy="leave one of them out")
    form: Literal["merge", "adapter"] | None = "merge" if merge else "adapter" if adapter else None
    with importing():
        from luthier.recipes.export import export

    return Answer(export(run.expanduser(), output=output.expanduser(), step=step, form=form))
