"""A row as the model sees it: token by token, the trained tokens in colour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.text import Text

from luthier.batch import NO_TOKEN, Sample
from luthier.hf.render import Tokenizer
from luthier.hf.vision.sight import sight_of

TRAINED, GIVEN, EDGE = "bold green", "dim", "bright_black"
PARTS = (" (first)", " (second)")
"""Of the documents of a row: of a pair the first is the preferred one."""
_LONGEST_CHARACTER = 4


def tokens_of(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokens of a document as plain data: ids, text, weight. A character's stand together, and so do an image's."""
    ids = [int(sample.tokens[0]), *(int(token) for token in sample.targets if token != NO_TOKEN)]
    weights = [0.0, *(float(weight) for weight in sample.weights)]
    sight = sight_of(tokenizer)
    shown: list[dict[str, Any]] = []
    for start, end, text in _pieces(ids, weights, tokenizer):
        last = shown[-1] if shown else {}
        if sight is not None and ids[start] in sight.ids and last.get("ids", [])[-1:] == ids[start:end]:
            last["ids"] += ids[start:end]  # a picture's many tokens stand together
            last["text"] = f"{text}x{len(last['ids'])}"
        else:
            shown.append({"ids": ids[start:end], "text": text, "weight": weights[start]})
    return shown


def render_row(sample: Sample, tokenizer: Tokenizer) -> Text:
    """A row for the terminal: a line of counts, then its tokens with a thin line between them.

    Trained tokens are green and bold, the others dim; a line end shows as a sign and a line end. Each document of a row
    that has several (the answers of a pair) stands under a line of counts of its own.
    """
    shown = Text()
    for picture in sample.pictures:
        shown.append(f"image {picture.path}\n", style=GIVEN)
    for number, document in enumerate(sample.documents):
        name = f"{sample.origin or 'row'}{PARTS[min(number, 1)] if sample.parts else ''}"
        if number:
            shown.append("\n")
        _render(replace(document, origin=name), tokenizer, shown)
    for key, value in sample.meta.items():
        shown.append(f"\n{key}: {value}", style=EDGE)
    return shown


def _render(sample: Sample, tokenizer: Tokenizer, shown: Text) -> None:
    trained = int((sample.weights != 0).sum())
    length = 1 + int((sample.targets != NO_TOKEN).sum())
    shown.append(f"{sample.origin}: {length:,} tokens, {trained:,} trained on\n", style="bold")
    for token in tokens_of(sample, tokenizer):
        text = str(token["text"]).replace("\r", "␍").replace("\t", "⇥").replace("\n", "⏎\n")
        visible = "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)
        shown.append(visible, style=TRAINED if token["weight"] else GIVEN)
        if not visible.endswith("\n"):
            shown.append("│", style=EDGE)


def _pieces(ids: list[int], weights: list[float], tokenizer: Tokenizer) -> Iterator[tuple[int, int, str]]:
    start = 0
    while start < len(ids):
        end = start + 1
        text = _decode(tokenizer, ids[start:end])
        first = end, text
        # a character of several bytes may lie in several tokens, none of which is text alone
        most = min(len(ids), start + _LONGEST_CHARACTER)
        while "\ufffd" in text and end < most and weights[end] == weights[start]:
            end += 1
            text = _decode(tokenizer, ids[start:end])
        if "\ufffd" in text:
            end, text = first
        yield start, end, text
        start = end


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
