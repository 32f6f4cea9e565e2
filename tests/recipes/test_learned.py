"""Prompts and prefixes as a user has them: trained, gone on with, exported, opened by PEFT, and text made with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.config import RunConfig, load_config
from luthier.errors import CheckpointError, ConfigError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.recipes.export import export
from luthier.recipes.generate import generate
from luthier.recipes.methods import train as train_by_method
from luthier.recipes.sft import train
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import save_strong

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

KINDS = {
    "prompt": "{kind: prompt, num_virtual_tokens: 4}",
    "prefix": "{kind: prefix, num_virtual_tokens: 4, projection: true}",
    "adaption_prompt": "{kind: adaption_prompt, adapter_len: 4}",
}
DATA = Path(__file__).parents[2] / "examples" / "data" / "moods.jsonl"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    save_strong(debug_config("llama", layers=2, tie_word_embeddings=True), directory)
    tokenizer = debug_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(directory))
    return directory


def config(base: Path, output: Path, kind: str, *more: str) -> RunConfig:
    given = [
        f"model={base}",
        f"data.train.path={DATA}",
        "data.sequence_length=96",
        f"adapter={KINDS[kind]}",
        "optimizer.learning_rate=0.05",
        "train.rows_per_step=4",
        "train.steps=4",
        "train.precision=fp32",
        "checkpoint.every=2",
        f"output={output}",
    ]
    return load_config(None, [*given, *more])


@pytest.mark.parametrize("kind", KINDS)
def test_from_rows_to_text(base: Path, tmp_path: Path, kind: str) -> None:
    done = train(config(base, tmp_path / "run", kind))
    assert done["form"] == "adapter"
    # gone on with, bit for bit
    train(config(base, tmp_path / "again", kind, "train.steps=2"))
    train(config(base, tmp_path / "again", kind))
    one, other = (load_file(tmp_path / run / "export" / "adapter_model.safetensors") for run in ("run", "again"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    # what cannot be merged is exported as files, and refused as a model
    export(tmp_path / "run", output=tmp_path / "files")
    exported = load_file(tmp_path / "files" / "adapter_model.safetensors")
    assert all(torch.equal(value, exported[key]) for key, value in one.items())
    with pytest.raises(ConfigError, match="cannot be merged into weights"):
        export(tmp_path / "run", output=tmp_path / "model", form="merge")
    with pytest.raises(CheckpointError, match="adapter"):
        train(config(base, tmp_path / "run", "prompt" if kind != "prompt" else "prefix"))
    # text is that of PEFT
    given = load_config(None, [f"model={base}", "data={}", "generation.max_new_tokens=12", "train.precision=fp32"])
    [answer] = generate(given, ["the sea"], adapter=tmp_path / "files")["answers"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, str(tmp_path / "files")).eval()
    ids = tokenizer("the sea")["input_ids"]
    before = 4 if kind == "prompt" else 0
    with torch.no_grad():
        for _ in range(12):
            logits = theirs(input_ids=torch.tensor([ids])).logits[0, before:]
            assert len(logits) == len(ids)
            ids.append(int(logits[-1].argmax()))
    start = len(tokenizer("the sea")["input_ids"])
    assert answer["text"] == tokenizer.decode(ids[start:][: answer["tokens"]], skip_special_tokens=True).strip()
    [without] = generate(given, ["the sea"])["answers"]
    assert without["text"] != answer["text"]


@pytest.mark.parametrize(
    "adapter",
    [KINDS["prompt"], KINDS["adaption_prompt"], "{rank: 2, new_tokens: [<end>, red]}"],
    ids=["prompt", "adaption", "tokens"],
)
def test_preferences_are_measured_against_the_base(base: Path, tmp_path: Path, adapter: str) -> None:
    """From the first step on and after an interruption alike; with the base precomputed anew each time."""
    pairs = DATA.parent / "pairs.jsonl"
    given = ["method={name: dpo}", f"data.train.path={pairs}", "data.cache=no", f"adapter={adapter}", "train.steps=3"]
    given += ["data.sequence_length=256", "checkpoint.every=1"]
    whole = train_by_method(config(base, tmp_path / "whole", "prompt", *given))
    train_by_method(config(base, tmp_path / "parts", "prompt", *given, "train.steps=1"))
    parts = train_by_method(config(base, tmp_path / "parts", "prompt", *given))
    assert parts["loss"] == whole["loss"]
    one, other = (load_file(tmp_path / run / "export" / "adapter_model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
