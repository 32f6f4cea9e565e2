"""`luthier cat`."""

from __future__ import annotations

from typing import Annotated

import typer

from luthier.cli.frame import Answer, JsonOption, verb

app = verb("cat")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A recipe or config, as `luthier ls` lists them.")]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="Lay a config out for N processes.", show_default=False)
]


@app.command()
def cat(name: NameArgument, gpus: GpusOption = None, as_json: JsonOption = False) -> Answer:
    """Print the YAML of a config, or the source of a recipe: `luthier cat llama3.2-1b/lora --gpus 4`."""
    text = text_of(name, gpus)
    return Answer({"name": name, "text": text}, text.splitlines())


def text_of(name: str, gpus: int | None) -> str:
    """What a name of the catalogue stands for.

    Raises:
        ConfigError: there is none of that name.
    """
    from luthier.jobs.catalogue import RECIPE_SOURCE, recipes, run_of

    if name in recipes():
        from importlib.resources import files

        package, _, module = RECIPE_SOURCE.rpartition(".")
        return files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")
    from luthier.config.nodes import dump

    run = run_of(name, gpus)
    head = [f"# {name}: start it with `luthier train FILE`, on several processes with --nproc N."]
    return "\n".join([*head, dump(run)])
