"""Several adapters made one: the matrices of PEFT's `add_weighted_adapter`, bit for bit where nothing is random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import merge_utils
from safetensors.torch import load_file

from luthier.adapters import apply_lora, load_peft, merge, save_peft
from luthier.adapters.combine import Part, combine, kept
from luthier.adapters.rows import NewTokens
from luthier.config import LoraConfig
from luthier.engine import build
from luthier.errors import ConfigError, ModelError
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.recipes.combine import combine_adapters
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, relative, tiny

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]

WEIGHTS = {"one": 0.7, "two": -0.4, "three": 1.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "two": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "alpha_pattern": {"up_proj": 3}},
    "three": {"r": 4, "lora_alpha": 2, "target_modules": ["q_proj"]},
}


def adapters(ranks: dict[str, int] | None = None) -> Any:
    """PEFT's model with three adapters of random values."""
    configs = {name: dict(config) for name, config in CONFIGS.items()}
    for name, rank in (ranks or {}).items():
        configs[name]["r"] = rank
    first, *others = [(name, peft.LoraConfig(**config)) for name, config in configs.items()]
    model = peft.get_peft_model(tiny("llama", torch.float32), first[1], adapter_name=first[0])
    for name, config in others:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def saved(model: Any, directory: Path) -> list[Part]:
    model.save_pretrained(directory)
    return [Part(directory / name, weight) for name, weight in WEIGHTS.items()]


def theirs(model: Any, directory: Path, method: str, **how: Any) -> dict[str, torch.Tensor]:
    model.add_weighted_adapter(list(WEIGHTS), list(WEIGHTS.values()), "all", combination_type=method, **how)
    model.save_pretrained(directory, selected_adapters=["all"])
    return load_file(directory / "all" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("cat", {}),
        ("linear", {}),
        ("magnitude_prune", {"density": 0.3}),
        ("ties", {"density": 0.4}),
        ("ties", {"density": 0.4, "sign": "frequency"}),
    ],
    ids=str,
)
def test_matrices_are_those_of_peft(tmp_path: Path, method: Any, how: dict[str, Any]) -> None:
    model = adapters({"three": 2} if method == "cat" else None)
    parts = saved(model, tmp_path / "parts")
    made = combine(parts, tmp_path / "ours", method=method, **how)
    asked = {"majority_sign_method" if key == "sign" else key: value for key, value in how.items()}
    expected = theirs(model, tmp_path, method, **asked)
    found = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert made.layers == 6
    assert made.rank == (10 if method == "cat" else 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    written, other = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "all"))
    assert sorted(written.pop("target_modules")) == sorted(other.pop("target_modules"))
    assert written == other


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_what_is_kept_at_random_is_combined_as_by_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    parts = saved(adapters(), tmp_path / "parts")
    combine(parts, tmp_path / "ours", method=method, density=0.5, seed=3)
    found = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    files = {name: load_file(tmp_path / "parts" / name / "adapter_model.safetensors") for name in WEIGHTS}
    for key, value in found.items():
        present = [name for name in WEIGHTS if key in files[name]]
        tensors = [files[name][key] for name in present]
        masks = [kept(key, number, tensor, 0.5, 3) for number, tensor in enumerate(tensors)]
        assert all(0.2 < float(mask.mean()) < 0.8 for mask in masks)
        following = iter(masks)
        monkeypatch.setattr(merge_utils.torch, "bernoulli", lambda tensor, following=following: next(following))
        scales = [
            WEIGHTS[name] * (3 if "up_proj" in key and name == "two" else CONFIGS[name]["lora_alpha"]) / 4
            for name in present
        ]
        signs = [-1 if "lora_A" in key and scale < 0 else 1 for scale in scales]
        weights = torch.tensor([sign * abs(scale) ** 0.5 for sign, scale in zip(signs, scales, strict=True)])
        expected = getattr(merge_utils, method)(tensors, weights, 0.5)
        monkeypatch.undo()
        assert torch.allclose(value, expected, rtol=1e-6, atol=0)


def test_random_choices_depend_on_the_seed_alone(tmp_path: Path) -> None:
    parts = saved(adapters(), tmp_path / "parts")
    found = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        combine(parts, tmp_path / str(number), method="dare_ties", density=0.5, seed=seed)
        found.append((tmp_path / str(number) / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]


def products(directory: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    return {
        key: scale * tensors[key.replace("lora_A", "lora_B")].double() @ value.double()
        for key, value in tensors.items()
        if "lora_A" in key
    }


def test_the_nearest_of_a_rank_is_that_of_peft(tmp_path: Path) -> None:
    model = adapters()
    parts = saved(model, tmp_path / "parts")
    combine(parts, tmp_path / "ours", method="svd", rank=3)
    theirs(model, tmp_path, "svd", svd_rank=3)
    expected = products(tmp_path / "all")
    for key, value in products(tmp_path / "ours").items():
        assert relative(value, expected[key]) < 1e-5, key


def test_the_sum_is_what_all_adapters_do_together(tmp_path: Path) -> None:
    parts = saved(adapters(), tmp_path / "parts")
    combine(parts, tmp_path / "all")
    together = tiny("llama")
    load_peft(together, tmp_path / "all")
    base = {name: value.clone() for name, value in tiny("llama").state_dict().items()}
    expected = tiny("llama")
    for part in parts:
        single = tiny("llama")
        load_peft(single, part.directory)
        merge(single)
        with torch.no_grad():
            for name, value in expected.state_dict().items():
                value += part.weight * (single.state_dict()[name] - base[name])
    assert relative(logits(together), logits(expected)) < 1e-6


def test_a_base_is_written_with_all_of_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny("llama", torch.float32).save_pretrained(tmp_path / "base")
    debug_tokenizer().save_pretrained(str(tmp_path / "base"))
    parts = saved(adapters(), tmp_path / "parts")
    told = combine_adapters(parts, output=tmp_path / "whole", model=str(tmp_path / "base"), precision="fp32")
    assert told["form"] == "merge"
    combine(parts, tmp_path / "all")
    expected = tiny("llama", torch.float32)
    load_peft(expected, tmp_path / "all")
    merge(expected)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_base_is_rounded_once_whatever_the_machine_is_fast_at(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no adapter touches keeps its bits; the rest is base and products in float32, rounded to the base's dtype."""
    monkeypatch.setattr(build, "choose_precision", lambda asked, device: asked or "bf16")
    base = tiny("llama", torch.float32).to(dtype)
    base.save_pretrained(tmp_path / "base")
    debug_tokenizer().save_pretrained(str(tmp_path / "base"))
    parts = saved(adapters(), tmp_path / "parts")
    combine_adapters(parts, output=tmp_path / "whole", model=str(tmp_path / "base"))
    combine(parts, tmp_path / "all")
    expected = base.float()
    load_peft(expected, tmp_path / "all")
    merge(expected)
    found = load_file(tmp_path / "whole" / "model.safetensors")
    wanted = {name: value.to(dtype) for name, value in expected.state_dict().items()}
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_another_base_is_told_of_by_its_option(tmp_path: Path) -> None:
    parts = saved(adapters(), tmp_path / "parts")
    with pytest.raises(ModelError, match=r"^--model: there is no linear layer .* in GPT2LMHeadModel"):
        combine_adapters(parts, output=tmp_path / "whole", model="debug:gpt2")


def test_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    parts = saved(adapters({"two": 2}), tmp_path / "parts")
    where = tmp_path / "made"
    with pytest.raises(ConfigError, match="take --method cat or svd"):
        combine(parts, where, method="linear")
    with pytest.raises(ConfigError, match="needs the share of entries"):
        combine(parts, where, method="ties")
    with pytest.raises(ConfigError, match="keeps all entries"):
        combine(parts, where, method="cat", density=0.5)
    with pytest.raises(ConfigError, match="only svd can be given a rank"):
        combine(parts, where, method="cat", rank=2)
    with pytest.raises(ConfigError, match="is no method"):
        combine(parts, where, method="average")  # type: ignore[arg-type]
    model = tiny("llama")
    apply_lora(model, LoraConfig(rank=4, target=["attn"]), tokens=NewTokens((3,)))
    disturb(model)
    save_peft(model, tmp_path / "rows")
    with pytest.raises(ConfigError, match="more than low-rank matrices"):
        combine([parts[0], Part(tmp_path / "rows")], where)
    wide = tiny("qwen3")
    apply_lora(wide, LoraConfig(rank=4, target=["q_proj"]))
    save_peft(wide, tmp_path / "wide")
    with pytest.raises(ConfigError, match="combine adapters of one base"):
        combine([parts[0], Part(tmp_path / "wide")], where)
    other = tiny("gpt2")
    apply_lora(other, LoraConfig(rank=4, target=["attn"]))
    save_peft(other, tmp_path / "gpt2")
    for name, base in ((parts[0].directory, "maker/llama"), (tmp_path / "gpt2", "maker/gpt2")):
        config = json.loads((name / "adapter_config.json").read_text())
        (name / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    with pytest.raises(
        ConfigError, match=r"its base is maker/gpt2, that of .* is maker/llama, and they share no layer"
    ):
        combine([parts[0], Part(tmp_path / "gpt2")], where)
    with pytest.raises(ConfigError, match="is one of the adapters"):
        combine_adapters(parts, output=parts[0].directory)
