"""`luthier combine`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.frame import Answer, JsonOption, importing, verb
from luthier.errors import UserError

app = verb("combine")


@app.command()
def combine(
    parts: Annotated[
        list[str],
        typer.Argument(metavar="DIR[=WEIGHT]...", help="Directories of PEFT files, each with its weight; 1 if none."),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where to write.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="cat (the exact sum), svd (the nearest of a lower rank), linear, magnitude_prune, ties, dare_linear "
            "or dare_ties.",
        ),
    ] = "cat",
    density: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Entries that are kept; not of cat, svd and linear.")
    ] = None,
    sign: Annotated[str, typer.Option(metavar="HOW", help="What elects a sign of ties: total or frequency.")] = "total",
    rank: Annotated[int | None, typer.Option(metavar="N", help="Of svd; the largest there is when left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is kept at random.")] = 0,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The base: write it whole, the adapters added to it.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model's repository brings.")
    ] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Make one adapter of several, weighted, or add all of them to their base."""
    if sign not in ("total", "frequency"):
        raise UserError(f"{sign!r} is not total or frequency", where="--sign")
    with importing():
        from luthier.adapters.combine import Part
        from luthier.recipes.combine import combine_adapters

    found = []
    for text in parts:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number) if name else 1.0
            if not math.isfinite(weight):
                raise ValueError
        except ValueError:
            raise UserError(f"{number!r} is no number", where=text, remedy="write DIR=0.5") from None
        found.append(Part(Path(name or text).expanduser(), weight))
    told = combine_adapters(
        found,
        output=output.expanduser(),
        method=method,  # type: ignore[arg-type]  # the recipe names those that there are
        density=density,
        sign=sign,  # type: ignore[arg-type]
        rank=rank,
        seed=seed,
        model=model,
        trust_remote_code=trust_remote_code,
    )
    what = f"{told['method']} of {len(found)} adapters: {told['layers']} layers, rank {told['rank']}"
    return Answer(told, [what, *([told["merged"]] if "merged" in told else []), f"written to {output}"])
