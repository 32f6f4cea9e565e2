"""A recipe of tinker-cookbook, unmodified, as a process that knows of the server by TINKER_BASE_URL alone.

benchmarks/cookbook.py runs the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from tests.tinker.server.served import KEY, Served, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Transformers, since recipes read its tokenizer there.

    Deep enough that the SDK does not take it for organisation, model and variant.
    """
    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(debug_config("llama")).save_pretrained(directory)
    debug_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(str(model), tmp_path_factory.mktemp("serve") / "server", "--precision", "fp32") as found:
        yield found


def run(served: Served, recipe: str, log: Path, **settings: Any) -> list[dict[str, Any]]:
    """What the recipe has logged, a step each."""
    settings |= {"model_name": served.model, "renderer_name": "role_colon", "log_path": log}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}"]
    environment = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command + [f"{name}={value}" for name, value in settings.items()],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.soak
def test_chat_sl_learns_and_goes_on_from_its_checkpoint(served: Served, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    sums = [(x, y) for x in range(4) for y in range(4)]
    turns = [[f"What is {x} + {y}?", str(x + y)] for x, y in sums]
    conversations = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in turns
    ]
    rows.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations), encoding="utf-8")
    settings = {"dataset": rows, "batch_size": 4, "max_length": 64, "learning_rate": 3e-3, "rolling_save_every": 1}
    first = run(served, "chat_sl.train", tmp_path / "log", **settings)
    both = run(served, "chat_sl.train", tmp_path / "log", **settings, num_epochs=2, behavior_if_log_dir_exists="resume")
    assert [step["step"] for step in both] == [*range(8)]
    assert [step["train_mean_nll"] for step in both[:4]] == [step["train_mean_nll"] for step in first]
    losses = [step["train_mean_nll"] for step in both]
    # The second run begins where the first ended: it has forgotten nothing.
    assert losses[0] > losses[3] > losses[4] > losses[7]
    # Of the states saved after each step the recipe has deleted all but what it ended with.
    kept = served.rest().list_user_checkpoints(limit=100).result().checkpoints
    assert {checkpoint.checkpoint_id for checkpoint in kept} == {"weights/final", "sampler_weights/final"}
