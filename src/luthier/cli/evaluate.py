"""`luthier evaluate`."""

from __future__ import annotations

import typer

from luthier.cli.frame import (
    AdapterOption,
    Answer,
    Arguments,
    DataOption,
    JsonOption,
    MeetingOption,
    ModelOption,
    NodesOption,
    ProcessesOption,
    entries,
    importing,
    launched,
    run_config,
    verb,
)
from luthier.launch import Outcome

app = verb("evaluate")


@app.command()
def evaluate(
    context: typer.Context,
    arguments: Arguments = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    data: DataOption = None,
    nproc: ProcessesOption = None,
    nnodes: NodesOption = None,
    rdzv_endpoint: MeetingOption = None,
    as_json: JsonOption = False,
) -> Answer | Outcome:
    """Measure the loss per token and the perplexity of a model on the validation rows of a config, or on --data."""
    config = run_config(arguments, model=model, validation=data, defaults={"data": {}})
    ranks = launched(context, None, nproc=nproc, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint)
    if ranks is not None:
        return ranks
    with importing():
        from luthier.data.report import DataReport
        from luthier.recipes.evaluate import evaluate

    result = evaluate(config, adapter=adapter)
    measured = {key: value for key, value in result.items() if key != "data"}
    return Answer(result, [*entries(measured), *DataReport.from_dict(result["data"]).lines()])
