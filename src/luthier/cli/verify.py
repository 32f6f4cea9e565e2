"""`luthier verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.frame import Answer, Arguments, JsonOption, ModelOption, importing, run_config, verb

app = verb("verify")


@app.command()
def verify(
    arguments: Arguments = None,
    model: ModelOption = None,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="The same architecture made small, with random weights."),
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes; if left out what the layout takes.")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Every causal model type, tiny, on ten layouts; writes a page of the docs.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Of --matrix: go on where it was.")] = False,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Of --matrix: the page; results go beside it as JSON.")
    ] = Path("docs/architectures.md"),
    as_json: JsonOption = False,
) -> Answer:
    """Prove that a layout computes what plain Transformers computes in one process.

    `luthier verify run.yaml --tiny parallel.tp=2`: loss, gradients, norm, copies and export of a few steps in float64.
    Leaves with 1 when a bound is broken.
    """
    if matrix:
        return _matrix(output, resume)
    config = run_config(arguments, model=model, defaults={"data": {}})
    with importing():
        from luthier.verify.run import verify as prove

    cells, lines = prove(config, tiny=tiny, nproc=nproc)
    return Answer({"layouts": cells}, lines, code=int(any(cell.status != "right" for cell in cells)))


def _matrix(output: Path, resume: bool) -> Answer:
    import sys
    import tempfile

    with importing():
        from luthier.verify.matrix import COLUMNS, run, write_page
        from luthier.verify.table import counts

    results = output.with_suffix(".json")
    with tempfile.TemporaryDirectory(prefix="luthier-matrix-") as scratch:
        found = run(Path(scratch), results, resume=resume, told=lambda line: print(line, file=sys.stderr, flush=True))
    write_page(found, output)
    told = counts(found, tuple(COLUMNS))
    wrong = sum(column["wrong"] for column in told.values())
    return Answer({"page": str(output), "results": str(results), **told}, code=int(wrong > 0))
