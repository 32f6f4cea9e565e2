"""A run that goes on with something else than it began with: what does not compare any more is not compared."""

import json
from pathlib import Path

import pytest

from luthier.config import RunConfig
from luthier.engine.checkpoint import committed
from luthier.recipes.sft import train


def run_of(tmp_path: Path, validation: str, steps: int) -> RunConfig:
    values = {
        "model": "debug:llama",
        "data": {"train": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / validation), "cache": False},
        "optimizer": {"learning_rate": 0.0},
        "train": {"steps": steps, "rows_per_step": 2, "precision": "fp32"},
        "evaluation": {"every": 1, "early_stopping": 3},
        "checkpoint": {"every": 1, "keep": 1},
        "output": str(tmp_path / "run"),
    }
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("renamed", [False, True])
def test_other_validation_rows_begin_the_best_and_the_patience_anew(tmp_path: Path, renamed: bool) -> None:
    """With a learning rate of 0 every measurement of the same rows is the same, and none is better than the first."""
    for name, text in (("rows", "to train on"), ("easy", "to train on"), ("hard", "Zq7x, 0x1f!")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    first = train(run_of(tmp_path, "easy.jsonl", steps=3))
    assert (first["best"]["step"], first["stopped_early"]) == (1, False)
    if renamed:
        (tmp_path / "easy.jsonl").rename(tmp_path / "same.jsonl")
        second = train(run_of(tmp_path, "same.jsonl", steps=8))
        assert (second["best"], second["steps"], second["stopped_early"]) == (first["best"], 4, True)
        return
    second = train(run_of(tmp_path, "hard.jsonl", steps=8))
    assert second["validation"]["loss"] != first["validation"]["loss"]
    assert second["best"] == {"step": 4, "loss": second["validation"]["loss"]}
    assert (second["steps"], second["stopped_early"]) == (7, True)
    assert [path.name for path in committed(tmp_path / "run" / "checkpoints")] == ["step-000004", "step-000007"]
    assert "the validation rows are others than before" in (tmp_path / "run" / "log.txt").read_text()
