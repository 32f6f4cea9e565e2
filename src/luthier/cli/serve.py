"""`luthier serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luthier.cli.frame import Answer, JsonOption, importing
from luthier.errors import ConfigError

if TYPE_CHECKING:
    from luthier.tinker.server.store import Store

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
keys = typer.Typer(help="Make, list and remove API keys.", no_args_is_help=True)
app.add_typer(keys, name="keys")

DEFAULT_DIRECTORY = Path("tinker-server")
DATABASE_VARIABLE = "LUTHIER_DATABASE_URL"
_PRECISIONS = ("fp32", "bf16", "fp64")
DirectoryOption = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Its books and weights; the same one goes on where it was.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar=DATABASE_VARIABLE,  # a URL with a password is safer there than in the list of processes
        help="postgresql://USER@HOST/NAME instead of a file of SQLite.",
    ),
]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Hub id, directory, .gguf file, package:NAME/FILE or debug:TYPE."
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Another than this machine alone needs keys.")] = "127.0.0.1",
    directory: DirectoryOption = DEFAULT_DIRECTORY,
    database: DatabaseOption = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="What else clients may call the model.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp64.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens-per-microbatch", min=1, help="How many positions run at once.")
    ] = 2048,
    ranks: Annotated[
        int, typer.Option("--nproc", metavar="N", min=1, help="Processes that models in training are laid out over.")
    ] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="LAYOUT", help='Over them: "dp_shard 2 x tp 2"; dp_shard alone when left out.'
        ),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="How many texts grow side by side.")] = 32,
    as_json: JsonOption = False,
) -> Answer | None:
    """Offer a model to the tinker SDK: `TINKER_BASE_URL=http://127.0.0.1:8000` and any `TINKER_API_KEY=tml-...`."""
    if context.invoked_subcommand is not None:
        return None
    if model is None:
        raise ConfigError("no model is named", where="--model", remedy="give a Hub id, a directory or debug:llama")
    if precision not in (None, *_PRECISIONS):
        raise ConfigError(f"{precision!r} is unknown", where="--precision", remedy=f"use {', '.join(_PRECISIONS)}")
    with importing(), _extra():
        from luthier.tinker.server.app import ServerConfig
        from luthier.tinker.server.app import serve as run
        from luthier.tinker.server.metrics import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    names = (*(name or ()), *([str(Path(model).resolve())] if Path(model).is_dir() else []))
    config = ServerConfig(
        model,
        directory,
        host,
        port,
        database,
        names,
        precision,
        device,
        tokens_per_microbatch=tokens,
        slots=slots,
        parallel=_degrees(layout, ranks),
        ranks=ranks,
    )
    heard: dict[str, Any] = {}

    def announce(url: str) -> None:
        heard["url"] = url
        logging.getLogger("luthier").info("listening", extra={"fields": {"url": url, "model": model}})

    asyncio.run(run(config, announce))
    return Answer(heard, ["the server has ended; start it again in the same directory to go on"])


def _degrees(layout: str | None, ranks: int) -> dict[str, Any] | None:
    if ranks == 1 and layout is None:
        return None
    from luthier.config import ParallelConfig
    from luthier.estimate.run import parse_layout
    from luthier.parallel.layout import Layout

    parallel = parse_layout(layout or "dp_shard -1", ParallelConfig())
    Layout.resolve(parallel, ranks)
    return parallel.model_dump() if ranks > 1 else None


@keys.command("add")
def add(
    name: str,
    directory: DirectoryOption = DEFAULT_DIRECTORY,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Make a key; it is shown now and never again."""
    with _books(directory, database) as store:
        from luthier.tinker.server.auth import add_key

        key = add_key(store, name)
    return Answer({"name": name, "key": key}, [key])


@keys.command("list")
def list_(
    directory: DirectoryOption = DEFAULT_DIRECTORY, database: DatabaseOption = None, as_json: JsonOption = False
) -> Answer:
    """Names of keys, and when they were made."""
    with _books(directory, database) as store:
        from luthier.tinker.server.auth import list_keys

        found = list_keys(store)
    lines = [f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(created))}  {name}" for name, created in found]
    told = [{"name": name, "created": created} for name, created in found]
    return Answer({"keys": told}, lines or ["there are no keys"])


@keys.command("remove")
def remove(
    name: str,
    directory: DirectoryOption = DEFAULT_DIRECTORY,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Let a key open nothing any more."""
    with _books(directory, database) as store:
        from luthier.tinker.server.auth import remove_key

        remove_key(store, name)
    return Answer({"removed": name}, [f"{name} opens nothing any more"])


@contextmanager
def _books(directory: Path, database: str | None) -> Iterator[Store]:
    with importing(), _extra():
        from luthier.tinker.server.store import Store, database_of

    store = Store(database_of(directory, database))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _extra() -> Iterator[None]:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"{error.name} is not installed"
        raise ConfigError(what, where="luthier serve", remedy="install it: pip install 'luthier[serve]'") from None
