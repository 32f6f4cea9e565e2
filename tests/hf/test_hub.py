"""Hub ids through the real client, against a Hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luthier.hf.load import load_model
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from tests.oracles.hub import hub


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    source = resolve("debug:llama")
    save_model(load_model(source), path / "models" / "maker" / "tiny", tokenizer=load_tokenizer(source))
    rows = path / "datasets" / "maker" / "rows"
    rows.mkdir(parents=True)
    (rows / "train.jsonl").write_text('{"text": "one row"}\n{"text": "another row"}\n')
    return path


def luthier(endpoint: str, home: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "LUTHIER_CACHE": str(home / "luthier"),
    }
    command = [sys.executable, "-m", "luthier", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_estimate_fetches_the_config_alone(root: Path, tmp_path: Path) -> None:
    with hub(root) as (endpoint, asked):
        code, told = luthier(endpoint, tmp_path, "estimate", "--model", "maker/tiny")
    assert code == 0, told
    assert any(path.endswith("config.json") for path in asked)
    assert not any("safetensors" in path and "/resolve/" in path for path in asked)


def test_a_model_and_rows_from_the_hub_train(root: Path, tmp_path: Path) -> None:
    arguments = ["train", "--model", "maker/tiny", "--data", "hf://maker/rows", "--output", str(tmp_path / "run")]
    with hub(root) as (endpoint, asked):
        code, told = luthier(endpoint, tmp_path, *arguments, "train.steps=2", "adapter.rank=2")
    assert code == 0, told
    assert told["steps"] == 2
    assert any("model.safetensors" in path for path in asked)


def test_what_is_not_there_is_one_sentence(root: Path, tmp_path: Path) -> None:
    model = "nobody/tiny"
    with hub(root) as (endpoint, _):
        code, told = luthier(endpoint, tmp_path, "estimate", "--model", model)
    assert code == 2
    error = told["error"]
    assert isinstance(error, dict)
    assert model in error["message"]
    assert "\n" not in error["message"]
