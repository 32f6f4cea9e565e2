"""Every example runs as its first lines say."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from luthier.cli.main import main

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As `make examples` has it, and the first line says how to run it."""
    assert file.read_text().splitlines()[0].startswith(f"# luthier train examples/{file.name}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LUTHIER_CACHE", str(tmp_path / "cache"))
    status = main(["train", str(file), f"output={tmp_path / 'run'}", "--json"])
    told = json.loads(capfd.readouterr().out)
    assert status == 0, told
    assert told["steps"] == told["steps_total"] > 0
    assert math.isfinite(told["loss"])
    assert any((tmp_path / "run" / "export").iterdir())


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


@pytest.mark.parametrize(
    ("name", "sizes", "first"),
    [
        ("grpo", ["--sums", "2", "--group", "4"], r"step +0  right 0\.00"),
        ("dpo", ["--pairs", "2"], rf"step +0  loss {math.log(2):.3f}  preferred"),  # nothing has changed yet
        ("distill", ["--sums", "2", "--answers", "4"], r"step +0  nats a token +-?0\.0\d  right 0\.00"),
    ],
)
def test_loops_in_tinkers_calls_run(
    name: str, sizes: list[str], first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights, in this process; docs/examples.md has what they learn with them."""
    program = ROOT / "examples" / f"tinker_{name}.py"
    assert len(program.read_text().splitlines()) < 80
    monkeypatch.setattr(sys, "argv", [str(program), "--model", "debug:llama", "--steps", "2", *sizes])
    runpy.run_path(str(program), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert re.match(first, lines[0])
    assert len(lines) == 2
