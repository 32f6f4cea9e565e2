"""`luthier train`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from luthier.cli.frame import Answer, Arguments, DataOption, JsonOption, ModelOption, OutputOption, run_config, verb

app = verb("train")


@app.command()
def train(
    arguments: Arguments = None,
    model: ModelOption = None,
    data: DataOption = None,
    output: OutputOption = None,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(help="Go on from the run directory's newest checkpoint: if there is one, never, or else fail."),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do two steps on real data, write nothing, say what the run would take.")
    ] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Fine-tune a model.

    `luthier train run.yaml adapter.rank=64`, or without a file: `luthier train --model MODEL --data rows.jsonl`.
    """
    config = run_config(arguments, model=model, data=data, output=output)
    from luthier.recipes import sft

    if dry_run:
        from luthier.recipes.dry_run import dry_run as rehearse

        return Answer(rehearse(config))
    return Answer(sft.train(config, resume=resume))
