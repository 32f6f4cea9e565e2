"""Exports: bit for bit through plain `from_pretrained`, tied and untied, bf16 and fp32, and never half of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.load import load_model
from luthier.hf.save import base_dtype, save_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import fingerprint, load_tokenizer

IDS = torch.arange(4, 44)[None]
KINDS = ["llama", "qwen3", "gemma2", "cohere2", "granite", "gpt2", "phi", "mixtral", "qwen3_moe", "opt", "bloom"]


def debug(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return load_model(resolve(f"debug:{kind}"), dtype=dtype, config=debug_config(kind, **changes), attention="eager")


def opened(directory: Path) -> PreTrainedModel:
    """By plain Transformers, which must miss nothing and find nothing too many."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model


def keys(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found |= set(handle.keys())
    return found


class Making:
    """A transform: makes one weight of itself and another, and leaves out what belongs to adapters."""

    def __init__(self, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name, self.make = name, make

    def sources(self, name: str) -> Sequence[str] | None:
        if "lora_" in name:
            return None
        return (name, "model.norm.weight") if name == self.name else (name,)

    def shape(self, name: str, own: torch.Size) -> torch.Size:
        return own

    def keeps_tie(self, twin: str, owner: str) -> bool:
        return self.name not in (twin, owner)

    def __call__(self, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        assert name == self.name
        assert len(sources) == 2
        return self.make(sources[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = debug(kind, dtype)
    save_model(model, tmp_path / "out", tokenizer=None, shard_bytes=100_000)
    plain = opened(tmp_path / "out")
    assert plain.dtype == dtype
    ours = model.state_dict()
    assert {name: torch.equal(value, ours[name]) for name, value in plain.state_dict().items()} == dict.fromkeys(
        ours, True
    )
    assert torch.equal(plain(IDS).logits, model(IDS).logits)
    again = load_model(resolve(str(tmp_path / "out")), dtype=dtype, attention="eager")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert base_dtype(resolve(str(tmp_path / "out"))) == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_keys_as_plain_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = debug(kind)
    save_model(model, tmp_path / "ours", tokenizer=None)
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.save_pretrained(tmp_path / "plain")
    assert keys(tmp_path / "ours") == keys(tmp_path / "plain")
    ours, theirs = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("ours", "plain"))
    assert ours == theirs


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tied: bool, tmp_path: Path) -> None:
    model = debug("llama", tie_word_embeddings=tied)
    save_model(model, tmp_path / "out", tokenizer=None)
    assert ("lm_head.weight" in keys(tmp_path / "out")) is not tied
    plain = opened(tmp_path / "out")
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is tied
    assert plain.config.tie_word_embeddings is tied


def test_a_head_that_has_left_its_embedding_is_written_untied(tmp_path: Path) -> None:
    model = debug("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1.0)
    save_model(model, tmp_path / "out", tokenizer=None)
    plain = opened(tmp_path / "out")
    assert plain.config.tie_word_embeddings is False
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    assert torch.equal(plain.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_a_transform_of_the_head_alone_unties_the_export_and_leaves_the_model(tmp_path: Path) -> None:
    model = debug("llama", tie_word_embeddings=True)
    before = model.lm_head.weight.detach().clone()
    save_model(model, tmp_path / "out", tokenizer=None, transform=Making("lm_head.weight", lambda w: w + 1))
    plain = opened(tmp_path / "out")
    assert torch.equal(plain.lm_head.weight, before + 1)
    assert torch.equal(plain.model.embed_tokens.weight, before)
    assert torch.equal(model.lm_head.weight, before)
    assert model.config.tie_word_embeddings is True


def test_adapters_are_refused_unless_dealt_with(tmp_path: Path) -> None:
    model = debug("llama")
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Parameter(torch.zeros(2, 64))
    with pytest.raises(ModelError, match=r"q_proj\.lora_A is no weight of a plain LlamaForCausalLM"):
        save_model(model, tmp_path / "out", tokenizer=None)
    assert list(tmp_path.iterdir()) == [], "nothing half written is left"
    save_model(model, tmp_path / "out", tokenizer=None, transform=Making("", lambda w: w))
    opened(tmp_path / "out")


def test_compiled_layers_leave_no_prefix(tmp_path: Path) -> None:
    model = debug("llama")
    expected = model(IDS).logits
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    save_model(model, tmp_path / "out", tokenizer=None)
    assert torch.equal(opened(tmp_path / "out")(IDS).logits, expected)


def test_the_base_dtype_is_kept_where_training_ran_wider(tmp_path: Path) -> None:
    model = debug("llama", torch.float32)
    save_model(model, tmp_path / "out", tokenizer=None, dtype=torch.bfloat16)
    plain = opened(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(plain.model.norm.weight, model.model.norm.weight.bfloat16())
    assert model.dtype == torch.float32


def test_tokenizer_template_and_stop_tokens_come_along(tmp_path: Path) -> None:
    tokenizer = debug_tokenizer()
    save_model(debug("llama"), tmp_path / "out", tokenizer=tokenizer, stop_tokens=[3, 0], card="# Mine\n")
    plain = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fingerprint(plain) == fingerprint(tokenizer)
    assert plain.chat_template == tokenizer.chat_template
    assert plain.special_tokens_map == tokenizer.special_tokens_map
    assert opened(tmp_path / "out").generation_config.eos_token_id == [3, 0]
    assert (tmp_path / "out" / "README.md").read_text() == "# Mine\n"
    assert str(tmp_path) not in (tmp_path / "out" / "tokenizer_config.json").read_text()


def test_our_own_tokenizer_is_found_where_transformers_puts_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = debug_tokenizer()  # Transformers would build Qwen2's own from this vocabulary
    save_model(debug("qwen2"), tmp_path / "out", tokenizer=tokenizer)
    assert "PreTrainedTokenizerFast.from_pretrained" in caplog.text
    assert fingerprint(load_tokenizer(resolve(str(tmp_path / "out")))) == fingerprint(tokenizer)


def test_shards_are_bounded_and_the_index_names_every_weight(tmp_path: Path) -> None:
    save_model(debug("llama"), tmp_path / "out", tokenizer=None, shard_bytes=150_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert set(index["weight_map"]) == keys(tmp_path / "out")
    assert all(file.stat().st_size < 160_000 for file in files)
    assert len(files) > 2


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_model(debug("llama"), out, tokenizer=None, shard_bytes=100_000)
    save_model(debug("gpt2"), out, tokenizer=None)
    assert opened(out).config.model_type == "gpt2"
    assert not (out / "model.safetensors.index.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="no export"):
        save_model(debug("llama"), mine, tokenizer=None)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_model(debug("gpt2"), out, tokenizer=None)

    def breaks(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the power went")

    broken = Making("model.layers.1.mlp.up_proj.weight", breaks)
    with pytest.raises(RuntimeError, match="the power went"):
        save_model(debug("llama"), out, tokenizer=None, transform=broken)
    assert opened(out).config.model_type == "gpt2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
