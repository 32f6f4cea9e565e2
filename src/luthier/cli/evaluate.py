"""`luthier evaluate`."""

from __future__ import annotations

from luthier.cli.frame import (
    AdapterOption,
    Answer,
    Arguments,
    DataOption,
    JsonOption,
    ModelOption,
    entries,
    run_config,
    verb,
)

app = verb("evaluate")


@app.command()
def evaluate(
    arguments: Arguments = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Measure the loss per token and the perplexity of a model on the validation rows of a config, or on --data."""
    config = run_config(arguments, model=model, validation=data, defaults={"data": {}})
    from luthier.data.report import DataReport
    from luthier.recipes.evaluate import evaluate

    result = evaluate(config, adapter=adapter)
    measured = {key: value for key, value in result.items() if key != "data"}
    return Answer(result, [*entries(measured), *DataReport.from_dict(result["data"]).lines()])
