"""`luthier evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks", metavar="A,B", help="Tasks of lm-evaluation-harness by name or pattern, or YAML files of your own."
    ),
]
FewShotOption = Annotated[
    int | None, typer.Option("--few-shot", metavar="N", min=0, help="Worked examples before each question of a task.")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="The first N questions of each task.")
]
ChatOption = Annotated[
    bool, typer.Option("--apply-chat-template", help="Put the questions of tasks as turns of the chat template.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="A,B",
        help="Of answers to the rows: exact_match, f1, rouge1, rouge2, rougeL, package.module:NAME or FILE.py:NAME.",
    ),
]
BesideOption = Annotated[
    Path | None,
    typer.Option("--side-by-side", metavar="FILE", help="Write answers before and after training: .html, .md, .jsonl."),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="MODEL", help="Whose answers stand beside; else the model without its adapter."),
]


@app.command()
def evaluate(
    context: typer.Context,
    arguments: Arguments = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    data: DataOption = None,
    tasks: TasksOption = None,
    few_shot: FewShotOption = None,
    limit: LimitOption = None,
    apply_chat_template: ChatOption = False,
    metrics: MetricsOption = None,
    side_by_side: BesideOption = None,
    base: BaseOption = None,
    nproc: ProcessesOption = None,
    nnodes: NodesOption = None,
    rdzv_endpoint: MeetingOption = None,
    as_json: JsonOption = False,
) -> Answer | Outcome:
    """Measure a model: the loss on the validation rows of a config or on --data, its answers to them, tasks."""
    config = run_config(arguments, model=model, validation=data, defaults={"data": {}})
    ranks = launched(context, None, nproc=nproc, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint)
    if ranks is not None:
        return ranks
    with importing():
        from luthier.data.report import DataReport
        from luthier.recipes.evaluate import Wanted, evaluate

    wanted = Wanted(
        tasks=_listed(tasks),
        few_shot=few_shot,
        limit=limit,
        chat=apply_chat_template,
        metrics=_listed(metrics),
        side_by_side=side_by_side,
        base=base,
    )
    result = evaluate(config, adapter=adapter, wanted=wanted)
    measured = {key: value for key, value in result.items() if key != "data"}
    lines = DataReport.from_dict(result["data"]).lines() if "data" in result else []
    return Answer(result, [*entries(measured), *lines])


def _listed(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
