"""Every row of the parity table holds: forward, gradients, files both ways, merging, layouts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.models import PEFT_WARNINGS
from tests.tables.adapters import COLUMNS, METHODS, PAGE, Method, parity, wrong

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
]


LONG = ("LoftQ", "LoRA beside rows of tokens, tied head")
"""Rows that take a quarter of a minute each, and whose kind has tests of its own."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, id=one.name, marks=[pytest.mark.soak] if one.name in LONG else []) for one in METHODS],
)
def test_a_method_is_pefts(method: Method, tmp_path: Path, world: Any) -> None:
    found = parity(method, tmp_path, world)
    assert set(found) == set(COLUMNS)
    assert wrong(method, found) == [], found
    assert {name for name, value in found.items() if isinstance(value, str)} == set(method.refused)


def test_the_page_has_every_method() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [method.name for method in METHODS if f"| {method.name}" not in page] == []
    assert "✗" not in page.partition("<!-- table")[2].partition("<!-- end")[0]
