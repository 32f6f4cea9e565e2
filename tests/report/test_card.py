"""Model cards tell what is needed and nothing that is private."""

from __future__ import annotations

from typing import Literal

import pytest
import yaml

from luthier.config import RunConfig
from luthier.report.card import model_card

CONFIG = {
    "model": "Qwen/Qwen3-0.6B",
    "data": {
        "train": [
            {"path": "/home/jane/private/rows.jsonl", "format": "chat"},
            {"path": "https://jane:hunter2@example.org/rows.jsonl?token=s3cret"},
            {"path": "hf://Salesforce/wikitext", "subset": "wikitext-2-raw-v1", "split": "train"},
        ],
        "validation_fraction": 0.05,
    },
    "adapter": {"kind": "lora", "rank": 8},
    "optimizer": {"name": "adamw", "learning_rate": 3e-4},
    "train": {"steps": 100, "tokens_per_step": 16384},
    "output": "/home/jane/runs/wiki",
}


@pytest.mark.parametrize("form", ["adapter", "merge"])
def test_card(form: Literal["adapter", "merge"]) -> None:
    measured = {"loss": 1.25, "validation": {"step": 100, "loss": 1.5, "perplexity": 4.4817}}
    card = model_card(RunConfig.model_validate(CONFIG), measured, form=form)
    for private in ("jane", "hunter2", "s3cret", "/home"):
        assert private not in card
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "Qwen/Qwen3-0.6B"
    assert yaml.safe_load(header)["library_name"] == {"adapter": "peft", "merge": "transformers"}[form]
    sources = ("`rows.jsonl` (chat)", "`https://example.org/rows.jsonl`", "`hf://Salesforce/wikitext` (subset")
    numbers = ("rank 8 on attn, mlp", "learning rate 0.0003", "1.5000", "4.482", "16,384 tokens a step")
    for told in ("# wiki", *sources, *numbers):
        assert told in body
    assert ("AutoPeftModelForCausalLM" in body) == (form == "adapter")


def test_card_of_a_local_model_without_measurements() -> None:
    fields = CONFIG | {"model": "/home/jane/models/base", "adapter": None, "data": {}}
    card = model_card(RunConfig.model_validate(fields), {"loss": None, "validation": None}, form="merge")
    assert "jane" not in card
    assert "Full fine-tuning of base" in card
    assert "base_model" not in card
    assert "## Measured" not in card
