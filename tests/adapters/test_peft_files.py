"""Adapters go both ways between here and PEFT with equal logits; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from luthier.adapters import adapted_layers, apply_lora, finish_lora, freeze, load_peft, save_peft, wholly_trained
from luthier.config import LoraConfig
from luthier.errors import ConfigError, ModelError
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, loss, relative, tiny

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
]

CASES: list[Any] = [
    pytest.param("llama", {"target": ["attn", "mlp"]}, id="llama"),
    pytest.param("llama", {"target": ["attn"], "rslora": True, "alpha": 5.5}, id="rslora"),
    pytest.param("llama", {"target": [r"model\.layers\.1\..*"]}, id="one layer"),
    pytest.param("llama-tied", {"target": ["attn", "unembed"]}, id="tied head"),
    pytest.param("llama", {"target": ["unembed"]}, id="untied head"),
    pytest.param("qwen3", {"target": ["mlp"], "train_modules": ["norm", "lm_head"]}, id="modules"),
    pytest.param("qwen3-tied", {"target": ["attn"], "train_modules": ["lm_head"]}, id="tied, head trained"),
    pytest.param("qwen3-tied", {"target": ["attn"], "train_modules": ["embed_tokens"]}, id="tied, embedding trained"),
    pytest.param("qwen3-tied", {"target": ["attn"], "train_modules": ["embed_tokens", "lm_head"]}, id="tied, both"),
    pytest.param("gpt2", {"target": ["attn", "mlp"]}, id="gpt2"),
    pytest.param("gpt2-untied", {"target": ["c_attn", "unembed"], "train_modules": ["wpe"]}, id="gpt2 untied"),
    pytest.param("mixtral", {"target": ["attn"]}, id="mixtral"),
]


def trained(kind: str, options: dict[str, Any], dtype: torch.dtype) -> Any:
    """An adapted model after it has been trained for two steps."""
    model = tiny(kind, dtype)
    apply_lora(model, LoraConfig(**({"rank": 4} | options)))
    disturb(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_peft_reads_what_is_written_here(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    ours = trained(kind, options, torch.float64)
    assert save_peft(ours, tmp_path / "adapter", base_model="the/base") == tmp_path / "adapter"
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    theirs = peft.PeftModel.from_pretrained(tiny(kind), tmp_path / "adapter", autocast_adapter_dtype=False)
    assert relative(logits(theirs), logits(ours)) < 1e-12
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    again = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert set(written) == set(again)
    assert all(torch.equal(written[key], again[key]) for key in written)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_what_is_written_here_is_read_here(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    ours = trained(kind, options, torch.float64)
    save_peft(ours, tmp_path)
    again = tiny(kind)
    load_peft(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))
    assert wholly_trained(again) == wholly_trained(ours)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in ours.named_parameters() if p.requires_grad
    }
    save_peft(again, tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


PEFT_CASES: list[Any] = [
    pytest.param("llama", {"target_modules": ["q_proj", "v_proj"]}, id="names"),
    pytest.param("llama", {"target_modules": "all-linear"}, id="all-linear"),
    pytest.param("llama", {"target_modules": r".*\.(q|o)_proj"}, id="regex"),
    pytest.param("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}, id="one layer"),
    pytest.param(
        "llama", {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, id="pattern"
    ),
    pytest.param("llama", {"target_modules": "all-linear", "exclude_modules": ["down_proj"]}, id="excluded"),
    pytest.param(
        "llama",
        {
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2, "layers.1.self_attn.q_proj": 6},
            "alpha_pattern": {"up_proj": 12},
            "use_rslora": True,
        },
        id="ranks",
    ),
    pytest.param("llama-tied", {"target_modules": ["lm_head", "q_proj"]}, id="tied head, base weights saved"),
    pytest.param("qwen3", {"target_modules": ["lm_head"], "modules_to_save": ["norm"]}, id="untied head, norm"),
    pytest.param("qwen3-tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, id="tied, head saved"),
    pytest.param(
        "qwen3-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        id="tied, both saved as one",
    ),
    pytest.param(
        "qwen3-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, id="tied, both"
    ),
    pytest.param("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, id="gpt2"),
    pytest.param("mixtral", {"target_modules": ["q_proj", "o_proj"]}, id="mixtral"),
]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("kind", "options"), PEFT_CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_peft_writes_is_read_here(kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    if kind == "mixtral" and dtype == torch.bfloat16:
        kind = "llama"  # the router's choice flips on a rounding
    torch.manual_seed(5)
    theirs = peft.get_peft_model(tiny(kind, dtype), peft.LoraConfig(r=4, **options), autocast_adapter_dtype=False)
    disturb(theirs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    ours = tiny(kind, dtype)
    load_peft(ours, tmp_path)
    assert relative(logits(ours).double(), logits(theirs.eval()).double()) < (1e-12 if dtype == torch.float64 else 3e-2)
    assert all(parameter.dtype == dtype for parameter in ours.parameters())
    if "ensure_weight_tying" in options:
        assert ours.lm_head.weight is ours.model.embed_tokens.weight


@pytest.mark.filterwarnings("ignore:Adapter name 'lora' should not be contained in the prefix:UserWarning")
def test_a_named_adapter_in_its_own_directory(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="lora")
    disturb(theirs)
    theirs.save_pretrained(tmp_path)
    ours = tiny("llama")
    load_peft(ours, tmp_path)
    assert relative(logits(ours), logits(theirs)) < 1e-6  # PEFT keeps adapters in float32 here
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"several adapters \(lora, other\); name one of them"):
        load_peft(tiny("llama"), tmp_path)


def test_the_config_has_pefts_fields(tmp_path: Path) -> None:
    ours = trained("llama", {"target": ["attn"], "dropout": 0.25}, torch.float32)
    save_peft(ours, tmp_path, base_model="the/base", revision="main")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    theirs = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.25,
        target_modules=["k_proj", "o_proj", "q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="the/base",
        revision="main",
        inference_mode=True,
    )
    expected = theirs.to_dict()
    expected["target_modules"] = sorted(expected["target_modules"])
    assert written == json.loads(json.dumps(expected, default=str))


def test_targets_are_written_by_full_name_where_endings_would_mean_more(tmp_path: Path) -> None:
    ours = trained("llama", {"target": ["layers.0.self_attn.q_proj"]}, torch.float32)
    save_peft(ours, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == ["model.layers.0.self_attn.q_proj"]


def test_wrappings_of_other_tools_are_taken_off_the_keys(tmp_path: Path) -> None:
    ours = trained("llama", {"target": ["attn"]}, torch.float64)
    save_peft(ours, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key.replace("layers.1.", "layers.1._orig_mod."): v for key, v in load_file(file).items()}, file)
    again = tiny("llama")
    load_peft(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))


def test_a_bin_file_is_read_without_executing_anything(tmp_path: Path) -> None:
    ours = trained("llama", {"target": ["attn"]}, torch.float64)
    save_peft(ours, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    again = tiny("llama")
    load_peft(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))
    torch.save({"x": Path("a")}, tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="damaged, or holds more than tensors"):
        load_peft(tiny("llama"), tmp_path)


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace("lora_A", "lora.lora_A"): value for key, value in tensors.items()}


def one_less(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if "layers.1.self_attn.q_proj" not in key}


def half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if "layers.1.self_attn.q_proj.lora_A" not in key}


def wider(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([value, value], -1) if "lora_A" in key else value for key, value in tensors.items()}


def embedded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 67)}


def resized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"base_model.model.model.embed_tokens.weight": torch.zeros(69, 24)}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"base_model.model.model.embed_tokens.weight": torch.zeros(67, 24)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, "there is no linear layer model.layers.0.self_attn.k_proj.lora"),
        (one_less, "says that model.layers.1.self_attn.q_proj is adapted, but no key of the weights is for it"),
        (half, "of model.layers.1.self_attn.q_proj only lora_B is there"),
        (wider, "the layer takes 24 and gives"),
        (embedded, "of model.embed_tokens only lora_A is there"),
        (resized, r"model.embed_tokens.weight is \[69, 24\] and the model's is \[67, 24\]; was the vocabulary resized"),
        (changed, "model.embed_tokens.weight differs from the base and is not trained"),
    ],
)
def test_keys_that_do_not_match_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    save_peft(trained("llama", {"target": ["attn"]}, torch.float64), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ModelError, match=said) as caught:
        load_peft(tiny("llama"), tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("use_dora", True, "lora_magnitude_vector is missing, which use_dora promises"),
        ("lora_bias", True, "it uses lora_bias"),
        ("layer_replication", [[0, 1]], "it uses layer_replication"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "it adapts the parameter mlp.experts.gate_up_proj, which"),
        ("bias", "all", "it trained biases"),
        ("init_lora_weights", "pissa", r"its initialisation \('pissa'\) changed the base weights"),
        ("peft_type", "IA3", "it holds an adapter of type IA3"),
        ("r", None, "a field is missing or of the wrong type"),
    ],
)
def test_parts_of_peft_that_are_not_supported(field: str, value: Any, said: str, tmp_path: Path) -> None:
    save_peft(trained("llama", {"target": ["attn"]}, torch.float32), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=said):
        load_peft(tiny("llama"), tmp_path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no adapter_config\.json"):
        load_peft(tiny("llama"), tmp_path)
    save_peft(trained("llama", {"target": ["attn"]}, torch.float32), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not a file")
    with pytest.raises(ModelError, match="damaged"):
        load_peft(tiny("llama"), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"there is no adapter_model\.safetensors"):
        load_peft(tiny("llama"), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_peft(tiny("llama"), tmp_path)
    with pytest.raises(ModelError, match="there are no adapters to save"):
        save_peft(tiny("llama"), tmp_path)


@pytest.mark.parametrize("kind", ["qwen3-tied", "gpt2"])
def test_training_goes_on_from_peft_files(kind: str, tmp_path: Path) -> None:
    options = {"target": ["attn"], "train_modules": ["lm_head"] if kind == "qwen3-tied" else [], "rank": 3, "alpha": 9}
    ours = trained(kind, options, torch.float32)
    save_peft(ours, tmp_path / "adapter")
    tiny(kind, torch.float32).save_pretrained(tmp_path / "base")
    config = LoraConfig(start_from=str(tmp_path / "adapter"), dtype="bf16")
    model = load_model(resolve(str(tmp_path / "base")), prepare=lambda model: str(apply_lora(model, config)))
    said = finish_lora(model, config)
    assert said.ranks == (3,)
    assert {layer.lora_A.weight.dtype for _, layer in adapted_layers(model)} == {torch.bfloat16}
    assert relative(logits(model), logits(ours)) < 2e-2
    whole = LoraConfig(start_from=str(tmp_path / "adapter"))
    again = tiny(kind, torch.float32)
    assert str(apply_lora(again, whole)) == str(said)
    assert torch.equal(logits(again), logits(ours))
    freeze(again)
    resolved = LoraConfig(**(whole.model_dump()))
    apply_lora(tiny(kind, torch.float32), resolved)


@pytest.mark.parametrize(
    ("asked", "where"),
    [({"rank": 8}, "adapter.rank"), ({"alpha": 3}, "adapter.alpha"), ({"rslora": True}, "adapter.rslora"),
     ({"target": ["mlp"]}, "adapter.target"), ({"train_modules": ["norm"]}, "adapter.train_modules")],
)  # fmt: skip
def test_contradicting_the_files_is_refused(asked: dict[str, Any], where: str, tmp_path: Path) -> None:
    save_peft(trained("llama", {"target": ["attn"]}, torch.float32), tmp_path)
    with pytest.raises(ConfigError) as caught:
        apply_lora(tiny("llama", torch.float32), LoraConfig(start_from=str(tmp_path), **asked))
    assert caught.value.where == where


def test_other_adapters_in_place_are_refused(tmp_path: Path) -> None:
    save_peft(trained("llama", {"target": ["attn"]}, torch.float32), tmp_path)
    model = tiny("llama", torch.float32)
    apply_lora(model, LoraConfig(rank=4, target=["mlp"]))
    with pytest.raises(ModelError, match="carries other adapters than these files hold"):
        load_peft(model, tmp_path)
