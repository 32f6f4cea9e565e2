"""Rows of single tokens: equal to PEFT's trainable tokens, forward, backward and in files; merged exactly."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from luthier.adapters import apply_lora, beside, is_adapter_weight, load_peft, merge, save_peft
from luthier.adapters.disabled import without_adapters
from luthier.adapters.rows import NewTokens, rows_of
from luthier.config import LoraConfig
from luthier.errors import ConfigError, ModelError
from tests.adapters.models import PEFT_WARNINGS, VOCABULARY, disturb, relative, tiny

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
]

OLD = (3, 40)
GROWN = (5, VOCABULARY, VOCABULARY + 1)
CASES = [(kind, ids) for kind in ("llama", "llama-tied", "gpt2", "qwen3-tied") for ids in (OLD, GROWN)]


def ids_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """Rows in which the tokens stand, and others."""
    found = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    found[0, :3], found[1, 4] = torch.tensor((tokens * 3)[:3]), tokens[-1]
    return found


def logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids_of(tokens), use_cache=False).logits
    return found


def loss(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids_of(tokens), labels=ids_of(tokens), use_cache=False).loss
    return found


def adapted(kind: str, tokens: tuple[int, ...]) -> Any:
    model = tiny(kind)
    target = ["attn"]
    apply_lora(model, LoraConfig(rank=4, target=target), tokens=NewTokens(tokens))
    disturb(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for own in rows_of(model).values():
            own.trainable_tokens_delta.copy_(torch.randn(own.trainable_tokens_delta.shape, generator=generator))
    return model


def grown(kind: str, tokens: tuple[int, ...]) -> Any:
    """The base as a user of PEFT prepares it."""
    base = tiny(kind)
    size = max(VOCABULARY, *(token + 1 for token in tokens))
    if size > VOCABULARY:
        base.resize_token_embeddings(size, mean_resizing=False)
    return base


def theirs(kind: str, tokens: tuple[int, ...], directory: Path) -> Any:
    return peft.PeftModel.from_pretrained(
        grown(kind, tokens), str(directory), is_trainable=True, autocast_adapter_dtype=False
    ).eval()


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_forward_and_gradients_are_those_of_peft(kind: str, tokens: tuple[int, ...], tmp_path: Path) -> None:
    ours = adapted(kind, tokens)
    save_peft(ours, tmp_path / "ours", base_model="the/base")
    other = theirs(kind, tokens, tmp_path / "ours")
    assert relative(logits(ours, tokens), logits(other, tokens)) < 1e-12
    loss(ours, tokens).backward()
    loss(other, tokens).backward()
    found = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert all(is_adapter_weight(name) for name in found)
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in other.named_parameters()
        if p.requires_grad
    }
    assert found.keys() == expected.keys()
    assert sum(name.endswith("trainable_tokens_delta") for name in found) == (2 if kind == "llama" else 1)
    for name, gradient in found.items():
        assert gradient is not None, name
        assert relative(gradient, expected[name]) < 1e-10, name


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_files_go_both_ways(kind: str, tokens: tuple[int, ...], tmp_path: Path) -> None:
    ours = adapted(kind, tokens)
    save_peft(ours, tmp_path / "ours", base_model="the/base")
    written = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert all(value.shape[0] == len(tokens) for key, value in written.items() if "token_adapter" in key)
    assert not any(key.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")) for key in written)
    # with True PEFT writes the table as well, as it does by itself where the table has grown
    theirs(kind, tokens, tmp_path / "ours").save_pretrained(tmp_path / "theirs", save_embedding_layers=tokens is GROWN)
    back = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert all(torch.equal(value, back[key]) for key, value in written.items())
    again = tiny(kind)
    load_peft(again, tmp_path / "theirs")
    assert torch.equal(logits(again, tokens), logits(ours, tokens))


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_merging_is_exact(kind: str, tokens: tuple[int, ...], tmp_path: Path) -> None:
    ours = adapted(kind, tokens)
    save_peft(ours, tmp_path, base_model="the/base")
    expected = theirs(kind, tokens, tmp_path).merge_and_unload()
    before = logits(ours, tokens)
    merge(ours)
    assert type(ours.get_output_embeddings()) is torch.nn.Linear
    assert relative(logits(ours, tokens), before) < 1e-12
    assert ours.config.vocab_size == expected.config.vocab_size
    for name, value in ours.state_dict().items():
        assert relative(value, expected.state_dict()[name]) < 1e-12, name
    embedding = ours.get_input_embeddings().weight
    assert (ours.get_output_embeddings().weight is embedding) == (kind != "llama")
    assert torch.equal(embedding, expected.get_input_embeddings().weight)


def test_first_values(tmp_path: Path) -> None:
    model = tiny("llama")
    table = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    report = apply_lora(model, LoraConfig(target=["attn"]), tokens=NewTokens((4, 8, VOCABULARY), fresh=(8, VOCABULARY)))
    assert "rows of 3 tokens" in str(report)
    for name, base in (("model.embed_tokens", table), ("lm_head", head)):
        rows = rows_of(model)[name].trainable_tokens_delta
        assert torch.equal(rows[0], base[4])
        assert torch.allclose(rows[1], base.mean(0))
        assert torch.equal(rows[1], rows[2])


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beyond the model's 67 that are not named"):
        apply_lora(tiny("llama"), LoraConfig(target=["attn"]), tokens=NewTokens((VOCABULARY + 1,)))
    with pytest.raises(ConfigError, match="carries LoRA"):
        apply_lora(tiny("llama"), LoraConfig(target=["unembed"]), tokens=NewTokens((1,)))
    with pytest.raises(ConfigError, match="trained whole"):
        apply_lora(tiny("llama"), LoraConfig(train_modules=["lm_head"]), tokens=NewTokens((1,)))
    model = adapted("llama", OLD)
    save_peft(model, tmp_path)
    with pytest.raises(ConfigError, match="the adapter's rows are of"):
        apply_lora(tiny("llama"), LoraConfig(start_from=str(tmp_path)), tokens=NewTokens((1, 2)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_file({k: v for k, v in weights.items() if "lm_head" not in k}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="the rows of lm_head are missing"):
        load_peft(tiny("llama"), tmp_path)
    assert config["trainable_token_indices"] == {"embed_tokens": list(OLD), "lm_head": list(OLD)}


def test_rows_of_the_embedding_alone_are_read(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[9, 2])
    other = peft.get_peft_model(tiny("llama"), config, autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        other.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"].normal_()
    other.save_pretrained(tmp_path)
    ours = tiny("llama")
    load_peft(ours, tmp_path)
    assert relative(logits(ours, (2, 9)), logits(other, (2, 9))) < 1e-12
    save_peft(ours, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["trainable_token_indices"] == [2, 9]


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("tokens", [OLD, GROWN], ids=["old", "grown"])
def test_without_adapters_rows_are_as_they_were(kind: str, tokens: tuple[int, ...]) -> None:
    model = tiny(kind)
    apply_lora(model, LoraConfig(rank=4, target=["attn"]), tokens=NewTokens(tokens))
    first = logits(model, tokens)  # B is zero
    disturb(model)
    with torch.no_grad():
        for own in rows_of(model).values():
            own.trainable_tokens_delta.mul_(-2)
    assert relative(logits(model, tokens), first) > 1e-2
    with without_adapters(model):
        assert torch.equal(logits(model, tokens), first)
    assert relative(logits(model, tokens), first) > 1e-2


def test_a_copy_beside_it_has_no_rows() -> None:
    model = adapted("llama-tied", GROWN)
    other = beside(model)
    expected = tiny("llama-tied")
    assert torch.equal(logits(other, OLD), logits(expected, OLD))
    assert torch.equal(logits(copy.deepcopy(model), GROWN), logits(model, GROWN))
