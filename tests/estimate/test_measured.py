"""Well-known models that were measured beforehand: the files are what the models are, and a search needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest

from luthier.config import RunConfig
from luthier.estimate import find_layouts, measured
from luthier.estimate.models import known
from luthier.estimate.remeasure import remeasured


def run(model: str, **more: Any) -> RunConfig:
    return RunConfig.model_validate({"model": model, "data": {"sequence_length": 4096}, **more})


def test_every_known_model_was_measured() -> None:
    there = {path.name for path in files("luthier.estimate").joinpath("sizes").iterdir()}
    assert there == {measured.file_name(full) for full in known()}


@pytest.mark.parametrize("full", ["HuggingFaceTB/SmolLM2-135M", "google/gemma-2-2b", "mistralai/Mixtral-8x7B-v0.1"])
def test_what_is_kept_is_what_the_model_is(full: str) -> None:
    kept = files("luthier.estimate").joinpath("sizes", measured.file_name(full)).read_text(encoding="utf-8")
    assert json.loads(remeasured(full)) == json.loads(kept)


@pytest.mark.parametrize(("model", "gpus"), [("Llama-3.1-8B", 32), ("Mixtral-8x7B-v0.1", 64)])
def test_a_search_finds_the_same_either_way(model: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = find_layouts(run(model), gpus)
    monkeypatch.setattr(measured, "find", lambda config: None)
    assert find_layouts(run(model), gpus) == fast


@pytest.mark.parametrize(
    "more",
    [{"adapter": {"rank": 8}}, {"train": {"precision": "fp32"}}, {"optimizer": {"name": "sgd"}}, {"revision": "v1"}],
    ids=lambda more: next(iter(more)),
)
def test_another_run_of_the_model_is_measured_itself(more: dict[str, Any]) -> None:
    assert measured.find(run("Qwen3-0.6B")) is not None
    assert measured.find(run("Qwen3-0.6B", **more)) is None


def test_a_search_among_a_known_models_layouts_imports_no_torch() -> None:
    program = (
        "import sys; from luthier.cli.main import main; "
        "code = main(['estimate', '--search', '--model', 'Qwen3-235B-A22B', '--gpus', '256', '--json']); "
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]; "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["layouts"]) == 10
