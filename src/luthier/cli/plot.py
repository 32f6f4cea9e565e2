"""`luthier plot schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated

import typer

from luthier.cli.frame import Answer, Arguments, JsonOption, run_config, verb
from luthier.errors import ConfigError

WIDTH, HEIGHT = 64, 12
BLOCKS = " ▁▂▃▄▅▆▇█"

app = verb("plot")


@app.callback(help="Draw the learning rate over the steps.")
def _plot() -> None:
    pass


@app.command()
def schedule(
    arguments: Arguments = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of the run; else train.steps.")] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Draw the learning rate of every step: `luthier plot schedule run.yaml schedule.name=cosine --steps 1000`."""
    config = run_config(arguments, defaults={"model": "debug:llama", "data": {}})
    total = steps or config.train.steps
    if total is None:
        raise ConfigError("is missing", where="train.steps", remedy="give --steps, since epochs have no fixed length")
    from luthier.optim.schedules import factor

    peak = config.optimizer.learning_rate
    rates = [peak * factor(step, total, config.schedule) for step in range(total)]
    result = {"name": config.schedule.name, "steps": total, "learning_rate": rates}
    return Answer(result, list(drawing(rates)))


def drawing(rates: Sequence[float]) -> Iterator[str]:
    """Columns of blocks, each the mean of the steps it stands for, with the scale beside and below."""
    width = min(WIDTH, len(rates))
    edges = [round(column * len(rates) / width) for column in range(width + 1)]
    means = [sum(rates[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(rates) or 1.0
    eighths = [round(mean / top * HEIGHT * 8) for mean in means]
    for row in reversed(range(HEIGHT)):
        label = f"{top * (row + 1) / HEIGHT:.2e}" if row % 3 == 2 else ""
        cells = "".join(BLOCKS[min(8, max(0, height - row * 8))] for height in eighths)
        yield f"{label:>9} |{cells}"
    yield f"{'':>9} +{'-' * width}"
    yield f"{'':>9}  step 1{f'step {len(rates)}':>{max(0, width - 6)}}"
