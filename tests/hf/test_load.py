"""Loading: equal to plain Transformers bit for bit, ties from the checkpoint's keys, and named faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import load_model
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from luthier.hf.weights import checkpoint_dtype

IDS = torch.arange(4, 44)[None]


def written(kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint that plain Transformers wrote."""
    model = load_model(resolve(f"debug:{kind}"), dtype=dtype)
    model.save_pretrained(directory)
    return directory


def rewrite(directory: Path, change: Any, **config: Any) -> Path:
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **config}))
    return directory


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2", "opt", "qwen3_moe", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_plain_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    attention = "eager" if kind in ("gemma2", "mamba") else "sdpa"
    directory = written(kind, tmp_path / "model", dtype)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    ours = load_model(resolve(str(directory)), dtype=dtype, attention=attention)
    assert type(ours) is type(plain)
    assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    assert ours.config.to_json_string() == plain.config.to_json_string()
    assert ours.generation_config == plain.generation_config
    assert vars(ours).keys() == vars(plain).keys()
    assert checkpoint_dtype(directory) == dtype


def test_the_dtype_asked_for_wins(tmp_path: Path) -> None:
    directory = written("llama", tmp_path / "model", torch.bfloat16)
    wide = load_model(resolve(str(directory)), dtype="fp64")
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert wide.config.dtype == torch.float64


def test_prepare_sees_meta_and_what_it_adds_and_freezes_stays(tmp_path: Path) -> None:
    directory = written("llama", tmp_path / "model")
    seen: list[bool] = []

    def prepare(model: Any) -> None:
        seen.append(all(p.is_meta for p in model.parameters()))
        model.requires_grad_(False)
        projection = model.model.layers[0].self_attn.q_proj
        projection.lora_A = nn.Parameter(torch.empty(2, 64, device="meta"))

    plain = load_model(resolve(str(directory)))
    ours = load_model(resolve(str(directory)), prepare=prepare)
    assert seen == [True]
    trained = [name for name, p in ours.named_parameters() if p.requires_grad]
    assert trained == ["model.layers.0.self_attn.q_proj.lora_A"]
    assert not any(p.is_meta for p in ours.parameters())
    weights = dict(plain.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in ours.named_parameters() if name in weights)


def test_random_weights_do_not_depend_on_what_else_is_in_the_model() -> None:
    def prepare(model: Any) -> None:
        model.model.layers[0].mlp.extra = nn.Linear(64, 64, device="meta")

    alone = dict(load_model(resolve("debug:llama"), seed=3).named_parameters())
    beside = dict(load_model(resolve("debug:llama"), seed=3, prepare=prepare).named_parameters())
    assert all(torch.equal(weight, beside[name]) for name, weight in alone.items())
    state = torch.get_rng_state()
    load_model(resolve("debug:llama"), seed=3)
    assert torch.equal(state, torch.get_rng_state())


def test_from_scratch_is_the_models_own_initialisation(tmp_path: Path) -> None:
    directory = written("gpt2", tmp_path / "model")
    (directory / "model.safetensors").unlink()  # a config is enough
    model = load_model(resolve(str(directory)), from_scratch=True, seed=1)
    std = model.config.initializer_range
    for layer in model.transformer.h:
        assert layer.attn.c_attn.weight.detach().std().item() == pytest.approx(std, rel=0.1)
        # GPT-2 scales what writes to the residual stream by the square root of twice its depth
        assert layer.mlp.c_proj.weight.detach().std().item() == pytest.approx(std / 2, rel=0.1)
        assert not layer.attn.c_attn.bias.any()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_two_different_tensors_are_not_tied_whatever_the_config_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = written("llama", tmp_path / "model")  # untied, so both are in the file
    rewrite(directory, lambda weights: None, tie_word_embeddings=True)
    seen: list[dict[str, str]] = []
    model = load_model(resolve(str(directory)), prepare=lambda m: seen.append(dict(m.all_tied_weights_keys)))
    assert seen == [{}], "whoever prepares the model must know already"
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is False
    assert "kept apart" in caplog.text


def test_equal_tensors_are_tied(tmp_path: Path) -> None:
    directory = written("llama", tmp_path / "model")

    def same(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    rewrite(directory, same, tie_word_embeddings=True)
    model = load_model(resolve(str(directory)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is not in"),
        (lambda w: w.pop("lm_head.weight"), r"lm_head\.weight is not in .* tie_word_embeddings to true"),
        (lambda w: w.update(other=torch.zeros(1)), "other is in the checkpoint but not in the model"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight is \[3\] in .* and \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, words: str, tmp_path: Path) -> None:
    directory = rewrite(written("llama", tmp_path / "model"), change)
    with pytest.raises(ModelError, match=words):
        load_model(resolve(str(directory)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_is_no_language_model(tied: bool, tmp_path: Path) -> None:
    """Without its head, and where the embedding could be taken for one."""
    config = debug_config("llama", tie_word_embeddings=tied, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a LlamaForSequenceClassification, which writes no text"):
        load_model(resolve(str(tmp_path)))
    assert load_model(resolve(str(tmp_path)), from_scratch=True).lm_head is not None


def test_no_weights_and_damaged_weights_are_said(tmp_path: Path) -> None:
    directory = written("llama", tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ModelError, match="no safetensors file"):
        load_model(resolve(str(directory)))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="from_scratch: true"):
        load_model(resolve(str(directory)))


def test_bin_files_are_read_as_tensors_only(tmp_path: Path) -> None:
    directory = written("llama", tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    model = load_model(resolve(str(directory)))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    torch.save({**weights, "path": Path("somewhere")}, directory / "pytorch_model.bin")  # needs code to be unpickled
    with pytest.raises(ModelError, match="more than tensors"):
        load_model(resolve(str(directory)))


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    directory = rewrite(written("llama", tmp_path / "m"), lambda w: None, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="quantised"):
        load_model(resolve(str(directory)))


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelError, match="no causal language model"):
        load_model(resolve(str(tmp_path)))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
"""


def test_code_of_a_repository_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = written("llama", tmp_path / "mine_model")
    (directory / "modeling_mine.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    rewrite(directory, lambda w: None, model_type="mine", architectures=["MineForCausalLM"], auto_map=auto)
    source = resolve(str(directory))
    with pytest.raises(ModelError, match="trust_remote_code: true"):
        load_model(source)
    model = load_model(source, trust_remote_code=True, attention="sdpa")
    assert type(model).__name__ == "MineForCausalLM"
    save_model(model, tmp_path / "out", tokenizer=None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, attn_implementation="sdpa")
    assert torch.equal(plain(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["no_such_attention", "flash_attention_2"])
def test_an_attention_that_cannot_be_had_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=rf"train\.attention: .*{name}"):
        load_model(resolve("debug:llama"), attention=name)


def test_one_device_needs_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    assert load_model(resolve("debug:llama"), device="cpu").device.type == "cpu"
