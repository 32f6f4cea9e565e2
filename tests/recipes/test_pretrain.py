"""Continued pre-training reads long documents whole: every token trains once, whatever sequence_length is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.config import RunConfig, dump_config, load_config
from luthier.data.rows import Rows, build_rows
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.recipes.methods import train

TEXTS = ["one " * 90, "short", "two and three " * 40]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def config(place: Path, method: Any = "pretrain", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": {"train": str(place / "rows.jsonl"), "sequence_length": 32, "cache": False},
        "method": method,
        "train": {"epochs": 1, "tokens_per_step": 128, "precision": "fp32"},
        "output": str(place / "run"),
    }
    return RunConfig.model_validate(values | changes)


@pytest.mark.parametrize("ends", [True, False])
def test_every_token_trains_once(place: Path, ends: bool) -> None:
    tokenizer = debug_tokenizer()
    run = config(place, {"name": "pretrain", "end_of_document": ends})
    rows = build_rows(run.data, "train", tokenizer)
    assert isinstance(rows, Rows)
    pieces = [rows[number] for number in range(len(rows))]
    assert max(map(len, pieces)) == 32
    assert all((piece.weights == 1).all() for piece in pieces)
    last = [tokenizer.eos_token_id] if ends else []
    documents = [tokenizer(text)["input_ids"] + last for text in TEXTS]
    assert np.concatenate([p.targets for p in pieces]).tolist() == [t for ids in documents for t in ids[1:]]
    assert np.concatenate([p.tokens for p in pieces]).tolist() == [t for ids in documents for t in ids[:-1]]


def test_a_run_trains_on_all_of_it_and_its_config_repeats_it(place: Path) -> None:
    run = config(place)
    summary = train(run)
    assert summary["tokens"] == summary["trained_tokens"] == sum(len(debug_tokenizer()(t)["input_ids"]) for t in TEXTS)
    (place / "again.yaml").write_text(dump_config(run))
    again = load_config(place / "again.yaml")
    assert (again.data.too_long, again.data.train[0].format) == ("split", "text")  # type: ignore[index]
    assert again == run


def test_rows_of_another_kind_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="for rows of format chat use method: sft"):
        config(place, data={"train": {"path": "rows.jsonl", "format": "chat"}})
    asked = config(place, data={"train": {"path": str(place / "rows.jsonl"), "options": {"eos": "no"}}})
    with pytest.raises(ConfigError, match="'no' is neither true nor false"):
        build_rows(asked.data, "train", debug_tokenizer())
    kept = config(place, data={"train": "rows.jsonl", "too_long": "drop"})
    assert kept.data.too_long == "drop"
