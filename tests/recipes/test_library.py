"""What `import luthier` offers: mistakes of its users are told as the command line tells them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import luthier

ROWS = str(Path(__file__).parents[2] / "examples" / "rows.jsonl")


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda state: luthier.read_rows(state, ROWS, colum="text"), "colum: there is no such field; .*'column'"),
        (lambda state: luthier.read_rows(state, ROWS, sequence_length=1), "sequence_length: "),
        (lambda state: luthier.generate(state, "Hello", max_new_token=3), "max_new_token: .*'max_new_tokens'"),
        (
            lambda state: luthier.load("debug:llama", precision="fp16"),
            "precision: fp16 is not offered; use fp32 or bf16",
        ),
        (lambda state: luthier.load("debug:llama", device="mps"), "train.device: mps has no float64"),
    ],
)
def test_a_mistake_is_a_user_error(mistake: Callable[[Any], object], told: str) -> None:
    with pytest.raises(luthier.UserError, match=told):
        mistake(luthier.load("debug:llama", precision="fp32"))
