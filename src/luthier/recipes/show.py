"""`luthier data show`: rows as the model sees them."""

from __future__ import annotations

from itertools import islice
from typing import Any, Literal

from rich.text import Text

from luthier.config import RunConfig
from luthier.data.loader import Rows, build_rows
from luthier.data.show import render_row, tokens_of
from luthier.recipes.setup import tokenizer_of


def show(
    config: RunConfig, *, rows: int, split: Literal["train", "validation"] = "train"
) -> tuple[dict[str, Any], list[Text | str]]:
    """The first rows of a config's data, token by token.

    Args:
        config: whose `model` gives the tokenizer.
        rows: how many.
        split: which rows.

    Returns:
        plain data for JSON, and the same in colour for the terminal.
    """
    tokenizer = tokenizer_of(config)
    found = build_rows(config.data.model_copy(update={"streaming": False}), split, tokenizer, seed=config.seed)
    assert isinstance(found, Rows)
    samples = [found[index] for index in islice(range(len(found)), rows)]
    result: dict[str, Any] = {
        "rows": [
            {"origin": sample.origin, "tokens": len(sample) + 1, "trained_tokens": int((sample.weights != 0).sum())}
            | {"pieces": [piece for document in sample.documents for piece in tokens_of(document, tokenizer)]}
            | ({"parts": list(sample.parts), "meta": dict(sample.meta)} if sample.parts or sample.meta else {})
            for sample in samples
        ],
        "report": found.report.to_dict(),
        "stop_ids": list(found.stop_ids),
        "stop_tokens": [tokenizer.convert_ids_to_tokens(token) for token in found.stop_ids],
    }
    lines: list[Text | str] = [render_row(sample, tokenizer) for sample in samples]
    lines.extend(found.report.lines())
    lines.append(f"turns end with {', '.join(map(repr, result['stop_tokens'])) or 'no token of their own'}")
    return result, lines
