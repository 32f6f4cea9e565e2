"""A row for the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from luthier.batch import Sample
from luthier.data.show import TRAINED, render_row, tokens_of


def test_tokens_and_colours(tiny):
    ids = tiny("Ab\n🎻\t<|im_end|>", add_special_tokens=False)["input_ids"]
    weights = [0.0] * len(ids)
    weights[-1] = 1.0
    sample = Sample.from_ids(ids, weights, "a.jsonl:3")
    pieces = tokens_of(sample, tiny)
    assert "".join(piece["text"] for piece in pieces) == "Ab\n🎻\t<|im_end|>"
    assert [token for piece in pieces for token in piece["ids"]] == ids
    assert len(next(piece for piece in pieces if piece["text"] == "🎻")["ids"]) == 4
    shown = render_row(sample, tiny)
    assert shown.plain.startswith(f"a.jsonl:3: {len(ids)} tokens, 1 trained on\n")
    assert "⏎\n" in shown.plain
    assert "⇥" in shown.plain
    green = [shown.plain[span.start : span.end] for span in shown.spans if span.style == TRAINED]
    assert green == ["<|im_end|>"]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(shown)
    assert "\x1b[1;32m<|im_end|>" in console.file.getvalue()


def test_half_a_character_and_control_characters(tiny):
    ids = tiny("🎻\0", add_special_tokens=False)["input_ids"]
    sample = Sample.from_ids(ids[2:], [1.0] * len(ids[2:]))
    assert "\\u0000" in render_row(sample, tiny).plain
    assert [token for piece in tokens_of(sample, tiny) for token in piece["ids"]] == ids[2:]
