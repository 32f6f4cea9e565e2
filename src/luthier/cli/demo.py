"""`luthier demo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.cli.frame import Answer, JsonOption, OutputOption, importing, verb

app = verb("demo")


@app.command()
def demo(output: OutputOption = Path("runs/demo"), as_json: JsonOption = False) -> Answer:
    """Train SmolLM2-135M on a subject it cannot know; ask it before and after; export; open with plain Transformers."""
    with importing():
        from luthier.recipes.demo import demo

    result = demo(output or Path("runs/demo"))
    return Answer(result, _told(result))


def _told(result: dict[str, Any]) -> Iterator[str]:
    perplexity = result["heldout_perplexity"]
    yield f"{result['steps']} steps on {result['rows']} conversations"
    yield f"held-out perplexity  {perplexity['before']:.2f} before, {perplexity['after']:.2f} after"
    for asked in result["questions"]:
        yield f"\n{asked['question']}  (right: {', '.join(asked['expected'])})"
        yield f"  before  {asked['before']}"
        yield f"  after   {asked['after']}"
    yield f"\n{result['export']} opened by plain Transformers: {result['opened_by_plain_transformers']}"
    yield f"talk with it: luthier chat --model {result['export']}"
