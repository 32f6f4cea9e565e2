"""Real runs on two ranks: one that is killed in the middle of a step ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from luthier.config import load_config
from tests.world import World

ROOT = Path(__file__).parents[2]
OPTIONS = ["--nproc", "2", "--max-restarts", "1", "--resume", "never", "--json"]
# Some weights are adapters', some train in full; dropout draws from each rank's own generator.
ADAPTER = {"rank": 4, "dropout": 0.1, "target": ["attn"], "train_modules": ["down_proj"]}


def write_config(directory: Path) -> Path:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Row {i}: " + "tokens, " * (1 + i % 7)}) + "\n" for i in range(30)))
    values = {
        "model": "debug:llama",
        "data": {"train": str(rows), "validation_fraction": 0.2, "sequence_length": 64},
        "optimizer": {"name": "adamw", "learning_rate": 1e-2},
        "schedule": {"name": "cosine", "warmup": 2},
        "train": {"steps": 6, "rows_per_step": 4, "precision": "fp32", "device": "cpu"},
        "parallel": {"dp_shard": 2},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 3, "asynchronous": False},
        "adapter": ADAPTER,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def whole_run(config: str, output: str) -> dict[str, Any]:
    """On every rank of a world: the run without a break."""
    from luthier.recipes.sft import train

    return train(load_config(Path(config), output=Path(output)))


def test_a_rank_killed_in_the_middle_of_a_step_changes_nothing(tmp_path: Path, world: Callable[[int], World]) -> None:
    config = write_config(tmp_path)
    expected, _ = world(2).run(whole_run, str(config), str(tmp_path / "whole"))

    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.mortal", "train", config, f"--output={tmp_path / 'broken'}", *OPTIONS],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 was ended by SIGKILL" in done.stderr
    assert "starting again from the last checkpoint (restart 1 of 1)" in done.stderr
    assert "going on from step 3" in done.stderr  # whatever --resume said, which was for the first start

    summary = json.loads(done.stdout)
    same = ("steps", "tokens", "trained_tokens", "loss", "validation", "best")
    assert {key: summary[key] for key in same} == {key: expected[key] for key in same}
    for name in ("export/adapter_model.safetensors", "checkpoints/step-000006/tensors/rank-00001.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
