"""What the verbs share: their options, how they load a config, what they answer."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luthier.errors import UserError
from luthier.launch import Outcome, keep_modules, request

if TYPE_CHECKING:
    from luthier.config import ParallelConfig, RunConfig

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG|KEY=VALUE", help="A YAML file, and values to put over it.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="Hub id, directory, .gguf file, package:NAME/FILE or debug:TYPE."),
]
DataOption = Annotated[str | None, typer.Option("--data", metavar="PATH", help="The rows, instead of the config's.")]
OutputOption = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="The run directory.")]
AdapterOption = Annotated[
    Path | None, typer.Option("--adapter", metavar="DIR", help="A directory with PEFT files to put on the model.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, all else on standard error.")
]
"""`main` looks for it itself, since an error in the arguments before it must be JSON too."""
ProcessesOption = Annotated[
    str | None,
    typer.Option("--nproc", metavar="N", help="Start N processes on this machine; auto is one for each GPU."),
]
NodesOption = Annotated[
    str | None, typer.Option("--nnodes", metavar="N|MIN:MAX", help="On how many machines this command is started.")
]
MeetingOption = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet: on one of them.")
]
RestartsOption = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", metavar="N", min=0, help="Go on from the last checkpoint when a process fails, N times."
    ),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb has to say.

    Attributes:
        result: plain data; what `--json` prints.
        lines: the same for people: text, or anything that rich prints. The result's entries when None.
        code: what the process leaves with.
    """

    result: Mapping[str, Any]
    lines: Iterable[object] | None = None
    code: int = 0


def verb(name: str) -> typer.Typer:
    """A typer app that looks like the others."""
    return typer.Typer(name=name, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def run_config(
    arguments: Sequence[str] | None,
    *,
    model: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    output: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The config that a command line asks for.

    Args:
        arguments: at most one YAML file, and overrides.
        model: the option of that name; so for data, validation and output.
        validation: rows to measure on instead of the config's.
        defaults: values of keys that this verb does not need.
    """
    from luthier.config import load_config

    path, overrides = split_arguments(arguments or ())
    if validation is not None:
        overrides.append("data.validation_fraction=null")
    return load_config(path, overrides, model=model, data=data, validation=validation, output=output, defaults=defaults)


def launched(
    context: typer.Context,
    logs: Path | None,
    *,
    nproc: str | None,
    nnodes: str | None,
    rdzv_endpoint: str | None,
    max_restarts: int | None = None,
    parallel: ParallelConfig | None = None,
) -> Outcome | None:
    """Start the ranks of this command, if it is to do that, and wait for them.

    Args:
        context: of the command.
        logs: directory for their logs; None for one that is kept only after a failure.
        nproc: the option of that name; so for the others.
        parallel: degrees that the ranks must multiply to.

    Returns:
        how they ended; None where this process is to do the work itself.
    """
    asked = request(os.environ, nproc=nproc, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, max_restarts=max_restarts)
    if asked is None:
        return None
    with importing():
        from luthier.launch.agent import start
        from luthier.parallel.layout import Layout

    fits = functools.partial(Layout.resolve, parallel) if parallel is not None else None
    return start(asked, context.find_root().obj, logs, fits=fits)


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Tell the YAML file from the overrides; a file whose name looks like an override is a file when it is there."""
    path: Path | None = None
    overrides: list[str] = []
    for argument in arguments:
        looks_so = re.match(r"[A-Za-z_][\w-]*(\.[\w-]+)*=", argument) is not None
        if path is None and (not looks_so or Path(argument).is_file()):
            path = Path(argument).expanduser()
        else:
            overrides.append(argument)
    return path, overrides


def typed(read: Callable[[], str], where: str) -> str:
    """What somebody has typed or piped in, without the white space around it.

    Args:
        read: gives it.
        where: names it in a message.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        text = read().strip()
        text.encode("utf-8")
    except UnicodeError:
        raise UserError("is not UTF-8 text", where=where, remedy="give it as UTF-8") from None
    return text


def to_json(result: Mapping[str, Any]) -> str:
    """A result as one line of JSON; numbers that JSON does not have (NaN, infinities) become null."""
    return json.dumps(plain(result), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Paths, data classes, tuples and scalars of arrays as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if callable(getattr(value, "item", None)):
        return plain(value.item())
    return str(value)


def entries(result: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A result for people, an aligned line for each entry."""
    width = max((len(str(key)) for key in result), default=0)
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}"
            yield from entries(value, indent + "  ")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{key}"
            for item in value:
                yield from entries(item, indent + "  ") if isinstance(item, Mapping) else (f"{indent}  {item}",)
        else:
            yield f"{indent}{key!s:<{width}}  {_short(value)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _short(value: Any) -> str:
    value = plain(value)
    if isinstance(value, list):
        return ", ".join(_short(item) for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a verb that needs torch and Transformers.

    They make a million objects that live as long as the process: looking for garbage among them, while they are made
    and ever after, takes a fifth of the time until the verb begins.
    """
    gc.disable()
    try:
        yield
    finally:
        keep_modules()
        gc.enable()
