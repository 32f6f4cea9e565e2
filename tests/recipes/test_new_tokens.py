"""Tokens that a tokenizer lacks: trained, gone on with, exported, opened by Transformers and PEFT, written by both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.config import RunConfig, load_config
from luthier.recipes.export import export
from luthier.recipes.generate import generate
from luthier.recipes.setup import inference_network, prepare_process
from luthier.recipes.sft import train
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import save_strong

TOKENS = ["<mood:calm>", "<end>"]
DATA = Path(__file__).parents[2] / "examples" / "data" / "moods.jsonl"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from luthier.hf.debug.tiny import debug_config, debug_tokenizer

    directory = tmp_path_factory.mktemp("models") / "base"
    save_strong(debug_config("llama", layers=2, tie_word_embeddings=True), directory)
    debug_tokenizer().save_pretrained(str(directory))
    return directory


def config(base: Path, output: Path, *more: str) -> RunConfig:
    given = [
        f"model={base}",
        f"data.train.path={DATA}",
        "data.sequence_length=64",
        "adapter.rank=2",
        "adapter.target=attn",
        f"adapter.new_tokens={TOKENS}",
        "optimizer.learning_rate=0.01",
        "train.rows_per_step=4",
        "train.steps=4",
        "train.precision=fp32",
        "checkpoint.every=2",
        f"output={output}",
    ]
    return load_config(None, [*given, *more])


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    train(config(base, output))
    return output


def test_a_run_goes_on_bit_for_bit(base: Path, run: Path, tmp_path: Path) -> None:
    train(config(base, tmp_path / "run", "train.steps=2"))
    train(config(base, tmp_path / "run"))
    one, other = (load_file(path / "export" / "adapter_model.safetensors") for path in (run, tmp_path / "run"))
    rows = [key for key in one if key.endswith("token_adapter.trainable_tokens_delta")]
    assert rows == ["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("kind", [pytest.param("merge", id="merged"), pytest.param("adapter", id="PEFT's files")])
def test_others_open_what_is_exported(run: Path, base: Path, tmp_path: Path, kind: str) -> None:
    export(run, output=tmp_path / "whole", form="merge")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    ids = [tokenizer.convert_tokens_to_ids(token) for token in TOKENS]
    assert len(tokenizer) == max(ids) + 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    assert merged.config.vocab_size == len(tokenizer) == len(merged.get_output_embeddings().weight)
    text = torch.tensor([[*tokenizer("<mood:calm> the sea")["input_ids"], ids[1]]])
    assert ids[0] in text
    with torch.no_grad():
        expected = merged(text).logits
        if kind == "merge":
            network = inference_network(config(base, run), prepare_process(config(base, run)), run / "export")
            found = network.model(text).logits.double()
        else:
            found = AutoPeftModelForCausalLM.from_pretrained(str(run / "export"), dtype=torch.float64)(text).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_new_tokens_are_read_when_text_is_made(run: Path, base: Path, tmp_path: Path) -> None:
    given = load_config(None, [f"model={base}", "data={}", "generation.max_new_tokens=8", "train.precision=fp32"])
    [with_adapter] = generate(given, ["<mood:calm> the"], adapter=run / "export")["answers"]
    export(run, output=tmp_path / "whole", form="merge")
    [merged] = generate(given.model_copy(update={"model": str(tmp_path / "whole")}), ["<mood:calm> the"])["answers"]
    assert with_adapter["text"] == merged["text"]


pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*mean_resizing.*"),
]
