"""`luthier cp`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.cat import GpusOption, NameArgument, text_of
from luthier.cli.frame import Answer, JsonOption, verb
from luthier.errors import UserError

app = verb("cp")


@app.command()
def cp(
    name: NameArgument,
    destination: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="Where to write it.")],
    gpus: GpusOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Copy a config or a recipe, to be changed: `luthier cp qwen3-0.6b/lora_single_device run.yaml`."""
    text = text_of(name, gpus)
    suffix = ".yaml" if text.startswith("#") else ".py"
    path = destination / f"{name.replace('/', '-')}{suffix}" if destination.is_dir() else destination
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        remedy = "name another, or give --force"
        raise UserError("is there already", where=str(path), remedy=remedy) from None
    except OSError as error:
        raise UserError(f"cannot be written: {os.strerror(error.errno or 0)}", where=str(path)) from None
    return Answer({"name": name, "path": str(path)}, [f"wrote {path}"])
