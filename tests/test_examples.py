"""Every example runs as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_loop_learns() -> None:
    losses = [float(found) for found in re.findall(r"loss ([\d.]+), gradient", run("examples/own_loop.py"))]
    assert losses[-1] < 0.85 * losses[0]


def test_a_loop_in_tinkers_calls_learns() -> None:
    told = run("examples/tinker_sft.py")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", told)]
    assert losses[-1] < 0.25 * losses[0]


def test_own_evaluation_finds_the_hardest_row() -> None:
    told = run("examples/own_evaluation.py")
    assert re.search(r"\d+ of \d+ tokens likelier than not; hardest row examples/rows\.jsonl:\d", told)
