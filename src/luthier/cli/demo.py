"""`luthier demo`."""

from __future__ import annotations

from pathlib import Path

from luthier.cli.frame import Answer, JsonOption, OutputOption, verb

app = verb("demo")


@app.command()
def demo(output: OutputOption = Path("runs/demo"), as_json: JsonOption = False) -> Answer:
    """Train SmolLM2-135M on a subject it cannot know; ask it before and after; export; open with plain Transformers."""
    from luthier.recipes.demo import demo

    return Answer(demo(output or Path("runs/demo")))
