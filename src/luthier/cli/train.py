"""`luthier train`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from luthier.cli.frame import (
    Answer,
    Arguments,
    DataOption,
    JsonOption,
    MeetingOption,
    ModelOption,
    NodesOption,
    OutputOption,
    ProcessesOption,
    RestartsOption,
    importing,
    launched,
    run_config,
    verb,
)
from luthier.errors import EXIT_USER_ERROR
from luthier.launch import Outcome

app = verb("train")


@app.command()
def train(
    context: typer.Context,
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
    nproc: ProcessesOption = None,
    nnodes: NodesOption = None,
    rdzv_endpoint: MeetingOption = None,
    max_restarts: RestartsOption = None,
    as_json: JsonOption = False,
) -> Answer | Outcome:
    """Fine-tune a model.

    `luthier train run.yaml adapter.rank=64`, or without a file: `luthier train --model MODEL --data rows.jsonl`.
    """
    config = run_config(arguments, model=model, data=data, output=output)
    logs, is_new = None if dry_run else config.output / "logs", not config.output.exists()
    where: Any = {"nproc": nproc, "nnodes": nnodes, "rdzv_endpoint": rdzv_endpoint, "max_restarts": max_restarts}
    if (ranks := launched(context, logs, **where, parallel=config.parallel)) is not None:
        if is_new and ranks.code == EXIT_USER_ERROR:
            from luthier.recipes.run_directory import RunDirectory

            RunDirectory(config.output).discard()
        return ranks
    with importing():
        from luthier.recipes import methods

    if dry_run:
        with importing():
            from luthier.recipes.dry_run import dry_run as rehearse

        return Answer(rehearse(config))
    summary = methods.train(config, resume=resume)
    interrupted = summary["interrupted"]
    return Answer(summary, _told(summary), code=128 + signal.Signals[interrupted] if interrupted else 0)


def _told(summary: dict[str, Any]) -> Iterator[str]:
    """A finished run in a few lines; metrics.jsonl and log.txt have the rest."""
    loss = f", loss {summary['loss']:.4f}" if summary["loss"] is not None else ""
    yield f"{summary['steps']:,} of {summary['steps_total']:,} steps, {summary['tokens']:,} tokens{loss}"
    if (validation := summary["validation"]) is not None:
        told = [f"validation loss {validation['loss']:.4f}"]
        for name in ("perplexity", "reward_margin", "reward_accuracy"):
            told += [f"{name.replace('_', ' ')} {validation[name]:.3f}"] if name in validation else []
        yield ", ".join(told)
    if (best := summary["best"]) is not None and best["step"] != summary["steps"]:
        yield f"best at step {best['step']}: {best['loss']:.4f} (luthier export --step {best['step']})"
    if summary["skipped_steps"]:
        yield f"{summary['skipped_steps']:,} steps were skipped, their loss or gradient was not finite"
    if summary["interrupted"]:
        yield f"stopped by {summary['interrupted']} and saved; the same command goes on from here"
    else:
        yield f"exported to {summary['export']}"
