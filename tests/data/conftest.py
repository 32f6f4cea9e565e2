"""The real tokenizer of SmolLM2, with the chat templates of the cases, and rows from text that a test writes down."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from luthier.batch import Sample
from luthier.config.sections import DataConfig
from luthier.data.rows import Rows, build_rows
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer

CASES = Path(__file__).parents[1] / "cases"
_MARKERS = re.compile(r"<\|[A-Za-z_]+\|>|<[a-z]+_of_turn>|\[gMASK\]|<sop>")


@pytest.fixture(scope="session")
def smol(smollm2: str) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer: no BOS by itself, pad and EOS are the same token, ChatML with a system turn of its own."""
    return load_tokenizer(resolve(smollm2))


@pytest.fixture(scope="session")
def with_template(smol: PreTrainedTokenizerBase) -> Callable[[str], PreTrainedTokenizerBase]:
    """The tokenizer with another template (its text, or the name of a case), markers added as special tokens."""

    def make(template: str) -> PreTrainedTokenizerBase:
        text = (CASES / "templates" / template).read_text() if template.endswith(".jinja") else template
        tokenizer = copy.deepcopy(smol)
        known = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        # the roles that templates write as <|role|> are markers too
        markers = {*_MARKERS.findall(text), *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))}
        if "<|' + m.role" in text or "<|{{" in text:
            tokenizer.add_special_tokens({"additional_special_tokens": sorted(markers - known)})
        else:
            found = sorted(set(_MARKERS.findall(text)) - known)
            tokenizer.add_special_tokens({"additional_special_tokens": found})
        tokenizer.chat_template = text
        return tokenizer

    return make


@pytest.fixture
def tiny() -> PreTrainedTokenizerBase:
    """The debug tokenizer, which needs no file."""
    return debug_tokenizer()


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[..., Rows]:
    """Rows of a file of the cases, or of values written as JSON lines."""

    def make(tokenizer: Any, what: str | list[Any], source: dict[str, Any] | None = None, **data: Any) -> Rows:
        if isinstance(what, str):
            path = CASES / "data" / what
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in what))
        given = {"train": [{"path": str(path), **(source or {})}], "cache": False, **data}
        config = DataConfig.model_validate(given)
        made = build_rows(config, "train", tokenizer)
        assert isinstance(made, Rows)
        return made

    return make


def ids_of(sample: Sample) -> list[int]:
    """All ids of a sample."""
    return [int(sample.tokens[0]), *(int(token) for token in sample.targets)]


def spans(tokenizer: Any, sample: Sample) -> list[str]:
    """The trained text, span by span."""
    found: list[list[int]] = []
    before = 0.0
    for target, weight in zip(sample.targets, sample.weights, strict=True):
        if weight and not before:
            found.append([])
        if weight:
            found[-1].append(int(target))
        before = float(weight)
    return [tokenizer.decode(span, skip_special_tokens=False) for span in found]


def whole(tokenizer: Any, sample: Sample) -> str:
    """All of the text."""
    return str(tokenizer.decode(ids_of(sample), skip_special_tokens=False))
