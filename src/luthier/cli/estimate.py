"""`luthier estimate`."""

from __future__ import annotations

from luthier.cli.frame import Answer, Arguments, DataOption, JsonOption, ModelOption, run_config, verb

app = verb("estimate")


@app.command()
def estimate(
    arguments: Arguments = None,
    model: ModelOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Say how many parameters, floating-point operations and bytes a run takes; reads the model's config.json alone."""
    config = run_config(arguments, model=model, data=data, defaults={"data": {}})
    from luthier.estimate import estimate, lines

    result = estimate(config)
    return Answer(result, lines(result))
