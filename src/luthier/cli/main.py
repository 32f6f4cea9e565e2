"""The command's entrance: which verbs there are, and the border where errors become a sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from luthier import __version__, launch
from luthier.cli.border import Border, discard
from luthier.cli.frame import Answer
from luthier.errors import EXIT_USER_ERROR, UserError
from luthier.launch.world import heed_launcher

INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write ends with, without the name of the file, where there is no room."""

VERBS = {
    "train": "Fine-tune a model on rows of text or conversations.",
    "evaluate": "Measure loss and perplexity of a model on rows.",
    "generate": "Answer prompts.",
    "chat": "Talk with a model.",
    "serve": "Offer the training step and sampling over HTTP, to the tinker SDK.",
    "jobs": "Fine-tune as jobs: on this machine, on Kubernetes, through Slurm.",
    "runtimes": "List what jobs can start from.",
    "ls": "List the recipes and the configs of known models.",
    "cat": "Print a recipe or a config.",
    "cp": "Copy a recipe or a config, to be changed.",
    "validate": "Check a config without starting anything.",
    "export": "Write a run's model as plain Transformers or PEFT files.",
    "combine": "Make one adapter of several, or add them all to their base.",
    "data": "Look at rows as the model sees them.",
    "estimate": "Say what a run would take, before it runs.",
    "plot": "Draw the learning rate over the steps.",
    "verify": "Prove that a model on a layout computes what plain Transformers does.",
    "doctor": "Say what this machine has and how fast it is.",
    "demo": "Train a small real model on the data that comes along.",
}


class Verbs(TyperGroup):
    """Shows every verb's line without importing its file."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, command, rest
        command = get_command(importlib.import_module(f"luthier.cli.{name}").app)
        command.name = name
        return name, command, rest


app = typer.Typer(cls=Verbs, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, help="Fine-tune any Hugging Face causal language model, exactly.")
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `luthier`; the process's own when None.

    Returns:
        The exit code: 0, 1 for a fault of Luthier's own, 2 for one that the user can mend, 130 or 143 when interrupted.
    """
    _open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    # What a rank is started with: this very command, with whatever the interpreter was told.
    command = [sys.executable, *(sys.orig_argv[1:] if argv is None else ["-m", "luthier", *words])]
    border = Border(as_json="--json" in words)
    if border.launched:
        heed_launcher()
    if not sys.stderr.isatty() or border.rank:
        os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars, which fill a log with their redrawing
    with _standard_output(reserved=border.as_json or border.launched or border.rank > 0) as out:
        try:
            answer = get_command(app).main(args=words, prog_name="luthier", standalone_mode=False, obj=tuple(command))
            if answer == INTERRUPTED:  # what typer makes of Ctrl-C
                raise KeyboardInterrupt
            if isinstance(answer, launch.Outcome):
                return border.pass_on(answer, out)
            if not isinstance(answer, Answer):
                return answer if isinstance(answer, int) else 0
            return border.answer(answer, out)
        except UserError as error:
            details = {"where": error.where, "what": error.what, "remedy": error.remedy}
            return border.fail(str(error), details, type(error).__name__, EXIT_USER_ERROR, out)
        except TyperException as error:
            return border.fail(_usage(error), {}, "UsageError", EXIT_USER_ERROR, out)
        except (KeyboardInterrupt, typer.Abort):
            return border.fail("interrupted", {}, "Interrupted", INTERRUPTED, out)
        except SystemExit as error:  # SIGTERM while there is nothing to save yet, or nothing any more
            code = error.code if isinstance(error.code, int) else 1
            return border.fail("interrupted", {}, "Interrupted", code, out)
        except BrokenPipeError:
            discard(out)  # whoever read it has left
            return 1
        except OSError as error:
            if error.filename is None and error.errno not in _FULL:
                return border.crash(error, out)
            place = os.fsdecode(error.filename) if error.filename is not None else "the disk"
            message = f"{place}: {error.strerror}" + ("; free some space" if error.errno in _FULL else "")
            return border.fail(message, {}, type(error).__name__, EXIT_USER_ERROR, out)
        except Exception as error:
            return border.crash(error, out)


def _open_streams() -> None:
    """Let a stream that was closed before the start (`<&-`, some supervisors) be an empty one.

    Else the next file that is opened would take its number, and what is meant for the stream would land in that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)  # ranks that are started from here have it too
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _usage(error: TyperException) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "luthier"
    sentence = " ".join(str(message).replace("Value error, ", "").split()).rstrip(".")
    return f"{path}: {sentence}" if "--help" in sentence else f"{path}: {sentence} (see {path} --help)"


@contextmanager
def _standard_output(*, reserved: bool) -> Iterator[TextIO]:
    """Where the answer goes. Reserved: what any library writes to standard output goes to standard error."""
    if not reserved:
        # a terminal or a file may have an encoding that lacks a character of the answer
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        yield sys.stdout
        return
    sys.stdout.flush()
    kept, usual = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        # names of files may hold bytes that are not UTF-8: JSON has an escape for them
        with open(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
    finally:
        sys.stdout = usual
        os.dup2(kept, 1)
        os.close(kept)


def entrance() -> None:
    """The console script."""
    sys.exit(main())
