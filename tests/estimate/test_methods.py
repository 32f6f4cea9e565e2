"""What a method keeps beside the model, against what tensors take in its own steps; and what is said of the rest."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from luthier.config import RunConfig
from luthier.errors import ConfigError
from luthier.estimate import estimate, find_layouts, lines
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.recipes.methods import recipe_of
from luthier.recipes.run import opened
from tests.estimate.layouts import save_config
from tests.estimate.test_memory import SIZES
from tests.estimate.watch import Watch

LENGTH = 250
LONG = "one two three four five six seven eight nine ten " * 60
ROWS: dict[str, dict[str, Any]] = {
    "pairs": {"prompt": "a", "chosen": LONG, "rejected": LONG[10:]},
    "labelled": {"prompt": "a", "completion": LONG, "label": True},
    "documents": {"text": LONG},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_config(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    debug_tokenizer("llama").save_pretrained(path)
    return path


def config(model: Path | str, method: dict[str, Any], scratch: Path | None = None, **more: Any) -> RunConfig:
    data: dict[str, Any] = {"sequence_length": LENGTH, "cache": False}
    if scratch is not None:
        kind = {"dpo": "pairs", "reward": "pairs", "kto": "labelled"}.get(method["name"], "documents")
        path = scratch / "rows.jsonl"
        path.write_text("".join(json.dumps(ROWS[kind] | {"prompt": f"{n}"}) + "\n" for n in range(6)))
        if kind == "documents":
            path.write_text("".join(json.dumps(ROWS[kind]) + "\n" for _ in range(6)))
        data["train"] = {"path": str(path)}
    train = {"rows_per_step": 2, "steps": 2, "precision": "fp32", "device": "cpu"}
    fields = {"model": str(model), "data": data, "train": train}
    return RunConfig.model_validate(fields | {"method": method, "output": str(scratch or "runs")} | more)


def peak(run: RunConfig) -> int:
    """Most bytes that tensors take in a run's first step, in which a reference is asked, or in its second."""
    take_step = recipe_of(run).take_step
    with opened(run, "never") as run_:
        state = run_.state
        held: list[torch.Tensor] = [*state.model.parameters(), *state.model.buffers()]
        held += [s for states in state.optimizer.state.values() for s in states.values() if isinstance(s, torch.Tensor)]
        held += list(run_.initial._copies.values()) if run_.initial is not None else []
        with Watch(held) as watch:
            for batch in islice(run_.loader, 2):
                take_step(run_, batch)
    return watch.peak


FULL: dict[str, Any] = {}
LORA = {"adapter": {"rank": 4}}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ({"name": "dpo", "reference": "base", "share_prompt": False}, FULL),
        ({"name": "dpo", "reference": "MODEL", "share_prompt": False}, LORA),
        pytest.param({"name": "kto", "reference": "base"}, FULL, marks=pytest.mark.soak),
        ({"name": "reward"}, FULL),
        pytest.param({"name": "distill", "teacher": "MODEL"}, FULL, marks=pytest.mark.soak),
        ({"name": "distill", "teacher": "MODEL", "top_k": 8}, LORA),
        ({"name": "distill", "teacher": "MODEL", "top_k": 8, "precompute": True}, LORA),
    ],
    ids=str,
)
def test_within_a_tenth(model: Path, tmp_path: Path, method: dict[str, Any], more: dict[str, Any]) -> None:
    named = {key: str(model) if value == "MODEL" else value for key, value in method.items()}
    run = config(model, named, tmp_path, **more)
    assert estimate(run)["memory"]["total"] == pytest.approx(peak(run), rel=0.1)


def flops(run: RunConfig) -> dict[str, int]:
    found: dict[str, int] = estimate(run)["flops"]
    return found


def test_what_is_kept_and_run_beside_the_model_is_counted(model: Path) -> None:
    plain = estimate(config(model, {"name": "sft"}))
    forward, weights = plain["flops"]["token_forward"], plain["memory"]["weights"]
    assert plain["memory"]["beside"] == plain["flops"]["token_beside"] == 0
    assert plain["method"] == {"name": "sft", "notes": []}

    again = config(model, {"name": "dpo", "reference": "base"})
    assert flops(again)["token_beside"] == forward
    assert flops(again)["token"] == 4 * forward
    assert flops(again)["step"] == 4 * forward * 2 * 2 * LENGTH  # two rows of two answers
    assert flops(config(model, {"name": "dpo"}))["token_beside"] == 0
    assert flops(config(model, {"name": "kto"}))["token_beside"] == forward
    assert flops(config(model, {"name": "kto", "reference": "base"}))["token_beside"] == 3 * forward
    assert flops(config(model, {"name": "distill", "teacher": str(model)}))["token_beside"] == forward

    grpo = {"name": "grpo", "rewards": ["a.py:b"], "beta": 0.1, "updates_per_sample": 2}
    one, two = (estimate(config(model, grpo), layout=layout) for layout in ("dp_shard 1", "dp_shard 2"))
    whole = plain["parameters"]["total"] * 4
    assert one["memory"]["beside"] == whole  # as it was before the first step
    assert two["memory"]["beside"] == pytest.approx(weights + whole / 2, rel=1e-3)  # and what samples
    assert one["flops"]["token"] == 2 * 3 * forward + 2 * forward
    assert one["flops"]["step"] == one["flops"]["token"] * 2 * 8 * LENGTH

    reward = estimate(config(model, {"name": "reward"}))
    assert reward["parameters"]["total"] == plain["parameters"]["total"] + SIZES["hidden_size"]
    assert reward["flops"]["token_forward"] == forward - 2 * SIZES["hidden_size"] * SIZES["vocab_size"]


def test_what_nobody_can_count_is_said(model: Path) -> None:
    grpo = config(model, {"name": "grpo", "rewards": ["a.py:b"], "beta": 0.1})
    text = "\n".join(lines(estimate(grpo, cluster="h200", gpus=2)))
    assert "sampling is not counted" in text
    assert "messages, time and MFU are those of one pass that trains" in text
    assert "memory, beside" in text
    text = "\n".join(lines(find_layouts(grpo, 2)))
    assert "  bsd  " in text
    assert "sampling is not counted" in text
    assert "bsd" not in "\n".join(lines(find_layouts(config(model, {"name": "sft"}), 2)))
    once = estimate(config(model, {"name": "dpo", "reference": str(model)}))
    assert "is asked once about each row" in once["method"]["notes"][1]
    seeing = estimate(config("debug:gemma3", {"name": "sft"}), layout="tp 2")
    assert seeing["method"]["notes"] == ["rows with images would be refused: they have dp_shard and dp_replicate alone"]


def test_a_reference_is_laid_out_as_the_model_and_may_refuse() -> None:
    run = config("debug:llama", {"name": "dpo", "reference": "debug:mamba"})
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot run on cp 2"):
        estimate(run, layout="cp 2")
    assert not any("cp" in entry["layout"] for entry in find_layouts(run, 2, keep=50)["layouts"])
