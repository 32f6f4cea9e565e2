"""`luthier estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from luthier.cli.frame import Answer, Arguments, DataOption, JsonOption, ModelOption, importing, run_config, verb
from luthier.errors import ConfigError

app = verb("estimate")

_LENGTH = 4096
"""Tokens of a document, where a search is not told how many."""


@app.command()
def estimate(
    arguments: Arguments = None,
    model: ModelOption = None,
    data: DataOption = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="h100, h200, cpu (this machine) or a YAML file: say time too."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="LAYOUT", help='"dp_shard 4 x tp 2", instead of the config\'s.')
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="Processes in all, which fill an open degree.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank layouts for --gpus GPUs, the fastest first.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Say how many parameters, operations, bytes and seconds a run takes; reads the model's config.json alone."""
    defaults = {"data": {"sequence_length": _LENGTH} if search else {}}
    config = run_config(arguments, model=model, data=data, defaults=defaults)
    with importing():
        from luthier import estimate as estimates

    if search:
        if layout is not None:
            raise ConfigError("a search finds layouts", where="--layout", remedy="leave out --search, or this")
        result = estimates.find_layouts(config, gpus or 1, cluster or "h200")
    else:
        result = estimates.estimate(config, cluster=cluster, gpus=gpus, layout=layout)
    return Answer(result, estimates.lines(result))
