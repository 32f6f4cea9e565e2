"""QLoRA: the numbers are bitsandbytes', and the formula's; around them nothing differs from a plain base of these."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes import functional as bnb
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from luthier.adapters import merge, save_peft
from luthier.config import LoraConfig, RunConfig
from luthier.engine.build import build_network
from luthier.engine.network import Network
from luthier.errors import ConfigError
from luthier.hf import nf4
from luthier.hf.nf4 import Nf4Weight, quantise, stored_bytes
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from luthier.recipes.export import export
from luthier.recipes.setup import inference_network
from luthier.recipes.sft import train
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, loss, relative, tiny
from tests.oracles.quantised import pefts_loftq

pytestmark = list(PEFT_WARNINGS)

KINDS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3-tied": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "mixtral": ["q_proj", "o_proj"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(192, 576), (64, 128), (24, 40), (10, 24), (8, 31), (2100, 1100)])
def test_numbers_are_those_of_bitsandbytes(shape: tuple[int, int], double: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    ours = quantise(weight, double=double)
    assert torch.equal(ours.codes, codes.view(-1))
    assert torch.equal(ours.scales, state.absmax)
    assert torch.equal(ours.dense(), bnb.dequantize_4bit(codes, state))
    assert stored_bytes(ours) == nf4.expected_bytes(weight.numel(), double)


def levels() -> torch.Tensor:
    """The sixteen levels as the paper's appendix E makes them: quantiles of a normal distribution, within [-1, 1]."""
    offset = 0.9677083
    up = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    down = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([up, torch.zeros(1, dtype=torch.float64), down]).sort().values
    return found / found.abs().max()


def test_codes_and_scales_are_the_formula() -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 0.05
    ours = quantise(weight, double=False)
    blocks = weight.double().view(-1, 64)
    scales = blocks.abs().amax(1)
    assert torch.equal(ours.scales.double(), scales)
    table = levels()
    distance = (blocks / scales[:, None]).reshape(-1, 1).sub(table).abs()
    codes = torch.stack([ours.codes >> 4, ours.codes & 15], 1).view(-1).long()
    # The nearest level; where two are as near to within what float32 tells apart, either.
    assert (distance.gather(1, codes[:, None]) - distance.amin(1, keepdim=True)).max() < 1e-6
    exact = table[codes].view(-1, 64) * scales[:, None]
    assert (ours.dense().double().view(-1, 64) - exact).abs().max() < 1e-6 * scales.max()


def test_doubly_quantised_scales_are_near_the_scales() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(3)) * 0.05
    plain, double = quantise(weight, double=False), quantise(weight, double=True)
    assert torch.equal(plain.codes, double.codes)
    assert relative(double.float_scales(), plain.scales) < 0.01
    assert double.stored / (2 * weight.numel()) < 0.26


def saved(kind: str, directory: Path) -> Path:
    tiny(kind).save_pretrained(directory)
    return directory


def network(path: Path | str, precision: Any = "fp64", *, double: bool = True, **adapter: Any) -> Network:
    made = build_network(
        resolve(str(path)),
        adapter=LoraConfig(quantize="nf4", double_quantize=double, **{"rank": 4, "alpha": 6, **adapter}),
        precision=precision,
        device=torch.device("cpu"),
    )
    disturb(made.model)
    return made


def plain_twin(ours: Any, kind: str, targets: list[str], dtype: torch.dtype) -> Any:
    """Plain Transformers and PEFT with the very weights that the quantised ones stand for."""
    base = tiny(kind, dtype)
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            parameter.copy_(nf4.dense(values[name]))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[name.removeprefix("base_model.model.").replace(".default", "")])
    return theirs.eval()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("base_model.model.").replace(".default", ""): grad for name, grad in found.items()}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("precision", "dtype", "bound"), [("fp64", torch.float64, 1e-10), ("fp32", torch.float32, 2e-6)]
)
def test_gradients_equal_pefts_beside_the_same_weights(
    kind: str, precision: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    ours = network(saved(kind, tmp_path), precision, target=KINDS[kind]).model
    theirs = plain_twin(ours, kind, KINDS[kind], dtype)
    quantised = [name for name, parameter in ours.named_parameters() if isinstance(parameter, Nf4Weight)]
    assert len(quantised) == {"llama": 14, "qwen3-tied": 14, "gpt2": 8, "mixtral": 8}[kind]
    assert relative(logits(ours), logits(theirs)) < bound
    left, right = gradients(ours), gradients(theirs)
    assert set(left) == set(right)
    assert {name: worst for name in left if (worst := relative(left[name], right[name])) > bound} == {}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_weights_are_transformers_own_quantisation(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path)
    ours = network(path, "fp32").model
    theirs = AutoModelForCausalLM.from_pretrained(path, quantization_config=qlora(), dtype=torch.float32)
    packed = {name: module.weight for name, module in theirs.named_modules() if type(module).__name__ == "Linear4bit"}
    assert len(packed) == {"llama": 14, "gpt2": 8}[kind]
    for name, theirs_packed in packed.items():
        weight = ours.get_parameter(f"{name}.weight")
        made = bnb.dequantize_4bit(theirs_packed.data, theirs_packed.quant_state)
        assert torch.equal(weight.codes, theirs_packed.data.view(-1))
        assert torch.equal(nf4.dense(weight), made.t() if kind == "gpt2" else made)


def qlora() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def test_no_plain_weight_is_kept_for_the_backward_pass(tmp_path: Path) -> None:
    ours = network(saved("llama", tmp_path), "fp32", target=["q_proj", "gate_proj"]).model
    ours.train()
    shapes = {parameter.shape for parameter in ours.parameters() if isinstance(parameter, Nf4Weight)}
    shapes |= {torch.Size(shape[::-1]) for shape in shapes}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        value = loss(ours)
    value.backward()
    assert any(isinstance(tensor, Nf4Weight) for tensor in kept)
    assert not [tensor.shape for tensor in kept if not isinstance(tensor, Nf4Weight) and tensor.shape in shapes]


def test_gpt2_keeps_no_plain_weight_either(tmp_path: Path) -> None:
    ours = network(saved("gpt2", tmp_path), "fp32", target=["c_fc"]).model
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss(ours).backward()
    assert not [t for t in kept if not isinstance(t, Nf4Weight) and t.shape in {(24, 72), (72, 24), (24, 96), (96, 24)}]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_is_what_the_quantised_base_and_the_adapter_make(kind: str, tmp_path: Path) -> None:
    made = network(saved(kind, tmp_path / "base"), "fp32", target=KINDS[kind])
    expected = logits(made.model)
    said = merge(made.model)
    assert said.layers == {"llama": 14, "gpt2": 8}[kind]
    assert 0 < said.deviation < 2e-7
    assert not [p for p in made.model.parameters() if isinstance(p, Nf4Weight)]
    assert relative(logits(made.model), expected) < 2e-6
    made.model.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(made.model))


def test_layers_without_an_adapter_are_exported_as_they_were_used(tmp_path: Path) -> None:
    from luthier.adapters import Merging

    made = network(saved("llama", tmp_path / "base"), "fp32", target=["q_proj"])
    save_model(made.model, tmp_path / "export", tokenizer=None, dtype=torch.float32, transform=Merging(made.model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert relative(logits(again), logits(made.model)) < 2e-6
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert any(isinstance(p, Nf4Weight) for p in made.model.parameters())


def test_peft_files_go_both_ways(tmp_path: Path) -> None:
    path = saved("llama", tmp_path / "base")
    ours = network(path, "fp32", target=KINDS["llama"]).model
    save_peft(ours, tmp_path / "adapter", base_model=str(path))
    base = AutoModelForCausalLM.from_pretrained(path, quantization_config=qlora(), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").train()  # bitsandbytes evaluates in bf16
    assert relative(logits(theirs), logits(ours)) < 2e-6
    unquantised = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(unquantised, tmp_path / "adapter")
    assert relative(logits(plain), logits(ours)) > 1e-3  # another base, so it is the quantised one that was used above
    again = build_network(
        resolve(str(path)),
        adapter=LoraConfig(quantize="nf4", start_from=str(tmp_path / "adapter")),
        precision="fp32",
        device=torch.device("cpu"),
    )
    assert torch.equal(logits(again.model), logits(ours))


def test_the_run_says_what_it_quantised(tmp_path: Path) -> None:
    assert str(network("debug:llama", "bf16").lora).endswith("NF4: 14 layers, 0.26x of bf16; whole base 0.60x")
    assert str(network("debug:mixtral", "bf16").lora).endswith("2 modules of fused experts are not quantised")


def test_a_copy_has_memory_of_its_own() -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.weight = torch.nn.Parameter(quantise(layer.weight, double=True), requires_grad=False)  # type: ignore[assignment]
    other = copy.deepcopy(layer)
    assert isinstance(other.weight, Nf4Weight)
    assert isinstance(other.weight, torch.nn.Parameter)
    assert torch.equal(other.weight.dense(), nf4.dense(layer.weight))
    assert other.weight.codes.data_ptr() != layer.weight.codes.data_ptr()


def test_a_quantised_weight_is_not_written_to() -> None:
    weight = quantise(torch.randn(64, 64), double=True)
    with pytest.raises(TypeError, match="would change a quantised weight in place"):
        weight.mul_(2)
    with pytest.raises(TypeError, match="is multiplied with"):
        F.linear(weight, torch.zeros(64, 64))


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    nf4.kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"luthier\[qlora\]"):
        network("debug:llama", "fp32")
    nf4.kernels.cache_clear()


def test_frozen_weights_are_not_to_be_saved() -> None:
    run = {"model": "debug:llama", "data": "rows.jsonl", "adapter": {"quantize": "nf4"}}
    with pytest.raises(ValueError, match="trainable_only: false would write a base"):
        RunConfig.model_validate(run | {"checkpoint": {"trainable_only": False}})
    with pytest.raises(ValueError, match="compile cannot take a base"):
        RunConfig.model_validate(run | {"train": {"compile": True}})


def run_of(tmp_path: Path, name: str, **changes: Any) -> RunConfig:
    data = Path(__file__).parents[2] / "src" / "luthier" / "demo" / "train.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:12]))
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": {"train": str(rows), "sequence_length": 128},
        "adapter": {"rank": 4, "quantize": "nf4", "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 4, "rows_per_step": 3, "precision": "bf16"},
        "checkpoint": {"every": 2},
        "output": str(tmp_path / name),
    }
    return RunConfig.model_validate(values | changes)


def test_a_run_goes_on_bit_for_bit_and_is_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = train(run_of(tmp_path, "whole"))
    part = run_of(tmp_path, "part")
    train(part.model_copy(update={"train": part.train.model_copy(update={"steps": 2})}))
    train(part)
    ours, theirs = (load_file(tmp_path / name / "export" / "adapter_model.safetensors") for name in ("part", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert whole["steps"] == 4
    [tensors] = (tmp_path / "whole" / "checkpoints").glob("step-*4/tensors/*.safetensors")
    assert not [key for key in load_file(tensors) if key.startswith("model.") and "lora" not in key]
    said = export(tmp_path / "whole", output=tmp_path / "merged", form="merge")
    assert "merged 14 adapters, largest deviation by rounding" in said["merged"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    used = inference_network(part, torch.device("cpu"), tmp_path / "part" / "export").model
    assert sum(isinstance(parameter, Nf4Weight) for parameter in used.parameters()) == 14


def test_a_quantised_network_answers(tmp_path: Path) -> None:
    from luthier.sampling.engine import SamplingEngine
    from luthier.sampling.request import SamplingRequest

    ours = network(saved("llama", tmp_path), "fp32", target=["q_proj", "down_proj"]).model
    engine = SamplingEngine(ours, slots=2, stop_token_ids=[])
    found = engine.sample([SamplingRequest([5, 6, 7], 6, temperature=0.0), SamplingRequest([9, 3], 6, temperature=0.0)])
    for prompt, result in zip(([5, 6, 7], [9, 3]), found, strict=True):
        expected = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                expected.append(int(ours(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
        assert list(result.tokens) == expected[len(prompt) :]


@pytest.mark.parametrize(("init", "rounds"), [("loftq", 1), ("loftq_iter_4", 4)])
def test_loftq_begins_as_pefts(init: str, rounds: int, tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    ours = build_network(
        resolve(str(path)),
        adapter=LoraConfig(
            rank=4, alpha=4, target=["q_proj", "down_proj"], quantize="nf4", double_quantize=False, init=init
        ),
        precision="fp32",
        device=torch.device("cpu"),
    ).model
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = plain.get_parameter(f"{name}.weight").detach()
        base, down, up = pefts_loftq()(weight, num_bits=4, reduced_rank=4, num_iter=rounds)
        layer = ours.get_submodule(name)
        made = layer.weight.dense()
        assert relative(made, base) < 1e-5
        assert relative(layer.lora_B.weight @ layer.lora_A.weight, up @ down) < 1e-4
        begun = made + layer.lora_B.weight @ layer.lora_A.weight
        assert (begun - weight).norm() < 0.8 * (quantise(weight, double=False).dense() - weight).norm()


def test_loftq_divides_by_the_scale(tmp_path: Path) -> None:
    path = saved("gpt2", tmp_path)
    products = []
    for alpha in (4, 12):
        adapter = LoraConfig(rank=4, alpha=alpha, target=["c_attn"], quantize="nf4", init="loftq")
        made = build_network(resolve(str(path)), adapter=adapter, precision="fp64", device=torch.device("cpu")).model
        layer = made.get_submodule("transformer.h.0.attn.c_attn")
        products.append(layer.lora_spec.scale * layer.lora_B.weight @ layer.lora_A.weight)
    assert relative(*products) < 1e-10
    lost = tiny("gpt2").get_parameter("transformer.h.0.attn.c_attn.weight") - layer.weight.dense()
    assert (lost.t() - products[0]).norm() < 0.9 * lost.norm()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"init": "loftq"}, "needs quantize: nf4"),
        ({"init": "loftq", "quantize": "nf4", "dora": True}, "no dora"),
        ({"init": "pissa", "quantize": "nf4"}, "takes a part out of a base that is not quantised"),
        ({"init": "loftq_iter"}, "is not default"),
    ],
)
def test_beginnings_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraConfig(**fields)


def test_loftq_beside_what_is_not_quantised_is_refused() -> None:
    with pytest.raises(ConfigError, match="lm_head is not quantised"):
        network("debug:llama", "fp32", target=["attn", "unembed"], init="loftq")


def test_an_adapter_of_another_base_is_merged(tmp_path: Path) -> None:
    config = run_of(tmp_path, "run", adapter={"rank": 4, "quantize": "nf4", "init": "loftq_iter_2"}, train={"steps": 1})
    assert train(config)["form"] == "merge"
    with pytest.raises(ConfigError, match="has quantised another base"):
        export(tmp_path / "run", output=tmp_path / "adapter", form="adapter")


def test_dora_beside_a_quantised_base_equals_pefts(tmp_path: Path) -> None:
    targets = KINDS["llama"]
    ours = network(saved("llama", tmp_path), "fp64", target=targets, dora=True).model
    base = tiny("llama")
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            parameter.copy_(nf4.dense(values[name]))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_dora=True)
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                own = values[name.removeprefix("base_model.model.").replace(".default", "")]
                parameter.copy_(own.view(parameter.shape))
    assert relative(logits(ours), logits(theirs.eval())) < 1e-6  # lengths are float32
