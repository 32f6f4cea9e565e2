"""`luthier validate`."""

from __future__ import annotations

from typing import Annotated

import typer

from luthier.cli.frame import Answer, Arguments, JsonOption, run_config, verb

app = verb("validate")


@app.command()
def validate(
    arguments: Arguments = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="Check the layout for N processes, too.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Check a YAML and what is put over it, and print it with every default spelled out; nothing is loaded."""
    from luthier.config import dump_config
    from luthier.config.faults import raise_all
    from luthier.errors import ConfigError
    from luthier.jobs.validate import check_layout

    config = run_config(arguments)
    errors: list[ConfigError] = []
    given = config.parallel.model_dump(exclude_unset=True)
    check_layout(given, gpus, lambda name: f"parallel.{name}", errors)
    raise_all(errors)
    return Answer({"valid": True, "config": config.model_dump(mode="json")}, dump_config(config).splitlines())
