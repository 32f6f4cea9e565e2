"""Outputs and gradients of adapted models against PEFT's, in float64 and fp32, and the ways that a layer computes."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from luthier.adapters import LoraLayer, LoraSpec, adapted_layers, apply_lora, attach
from luthier.adapters.products import low_rank_products
from luthier.adapters.structure import attach_all
from luthier.config import LoraConfig
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, loss, relative, rows, tiny

pytestmark = list(PEFT_WARNINGS)

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3-tied": ["q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def pair(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """One model adapted here and its twin adapted by PEFT, with the same values in A and B."""
    rslora = options.pop("rslora", False)
    ours = tiny(kind, dtype)
    apply_lora(ours, LoraConfig(rank=4, alpha=6, target=TARGETS[kind], rslora=rslora, **options))
    disturb(ours)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[kind], use_rslora=rslora, fan_in_fan_out=kind == "gpt2"
    )
    theirs = peft.get_peft_model(tiny(kind, dtype), config, autocast_adapter_dtype=False)
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[plain(name)])
    return ours, theirs.eval()


def plain(name: str) -> str:
    """Our name of one of PEFT's parameters."""
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {plain(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(ours: Any, theirs: Any, bound: float) -> None:
    left, right = gradients(ours), gradients(theirs)
    assert set(left) == set(right)
    assert {name: worst for name in left if (worst := relative(left[name], right[name])) > bound} == {}


@pytest.mark.parametrize("kind", list(TARGETS))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_gradients_equal_pefts(kind: str, dtype: torch.dtype, bound: float) -> None:
    ours, theirs = pair(kind, dtype)
    assert relative(logits(ours), logits(theirs)) < bound
    compare(ours, theirs, bound)


def test_rslora_equals_pefts() -> None:
    compare(*pair("llama", rslora=True), 1e-10)


def test_adapters_in_fp32_beside_bf16_compute_as_peft_does() -> None:
    ours = tiny("llama", torch.bfloat16)
    apply_lora(ours, LoraConfig(rank=4, alpha=6, target=TARGETS["llama"], dtype="fp32"))
    disturb(ours)
    x = torch.randn(1, 9, 24).bfloat16().requires_grad_()
    layer = ours.model.layers[0].self_attn.q_proj
    twin = peft.get_peft_model(
        tiny("llama", torch.bfloat16), peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"])
    )
    theirs = twin.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        theirs.lora_A.default.weight.copy_(layer.lora_A.weight)
        theirs.lora_B.default.weight.copy_(layer.lora_B.weight)
    found = []
    for module, down, up in (
        (layer, layer.lora_A, layer.lora_B),
        (theirs, theirs.lora_A.default, theirs.lora_B.default),
    ):
        x.grad = None
        y = module(x)
        y.square().sum().backward()
        assert y.dtype == x.dtype
        assert down.weight.grad.dtype == torch.float32
        found.append((y.detach(), x.grad, down.weight.grad, up.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    for ours_, theirs_ in zip(found[0][1:], found[1][1:], strict=True):
        assert relative(ours_.float(), theirs_.float()) < 8e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_base_weights_may_train_too(kind: str) -> None:
    ours, theirs = pair(kind)
    ours.requires_grad_(True)
    theirs.requires_grad_(True)
    for _ in range(2):
        compare(ours, theirs, 1e-10)


def test_with_gradient_checkpointing() -> None:
    ours, theirs = pair("llama")
    ours.train()
    ours.activation_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        compare(ours, theirs, 1e-10)
    assert all(not layer.lora_siblings._waiting for _, layer in adapted_layers(ours) if layer.lora_siblings)


def test_dropout_draws_as_plain_operations_do() -> None:
    layer = attach(torch.nn.Linear(8, 6, dtype=torch.float64), LoraSpec(2, 4.0, dropout=0.5)).train()
    with torch.no_grad():
        layer.lora_A.weight.normal_()
        layer.lora_B.weight.normal_()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    y.square().sum().backward()
    found = [x.grad, layer.lora_A.weight.grad, layer.lora_B.weight.grad]
    x.grad = None
    layer.zero_grad()
    torch.manual_seed(1)
    z = F.dropout(x, 0.5)
    expected = (
        F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(z, layer.lora_A.weight), layer.lora_B.weight) * 2
    )
    expected.square().sum().backward()
    assert relative(y, expected) < 1e-12
    for ours, theirs in zip(found, [x.grad, layer.lora_A.weight.grad, layer.lora_B.weight.grad], strict=True):
        assert relative(ours, theirs) < 1e-12
    assert torch.equal(layer.eval()(x), layer(x))


def test_gradcheck() -> None:
    layers = [attach(torch.nn.Linear(5, n, dtype=torch.float64), LoraSpec(2, 3.0)) for n in (4, 6)]
    for layer in layers:
        torch.nn.init.normal_(layer.lora_A.weight)
        torch.nn.init.normal_(layer.lora_B.weight)
    tensors = [p.detach().requires_grad_() for layer in layers for p in layer.parameters()]

    def run(x: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return low_rank_products(x, None, 1.5, False, [values[:4], values[4:]])

    assert torch.autograd.gradcheck(run, (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), *tensors))


def test_siblings_are_found_and_a_wrong_guess_changes_nothing() -> None:
    ours, _ = pair("llama")
    attention = ours.model.layers[1].self_attn
    group = attention.q_proj.lora_siblings
    assert group.layers == [attention.q_proj, attention.k_proj, attention.v_proj]
    assert attention.o_proj.lora_siblings is None
    mlp = ours.model.layers[1].mlp
    assert mlp.gate_proj.lora_siblings.layers == [mlp.gate_proj, mlp.up_proj]
    x, other = torch.randn(2, 3, 24, dtype=torch.float64), torch.randn(2, 3, 24, dtype=torch.float64)
    alone = {name: attach_like(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")}
    q, k, v = attention.q_proj(x), attention.k_proj(other), attention.v_proj(x)
    for name, y, given in (("q_proj", q, x), ("k_proj", k, other), ("v_proj", v, x)):
        assert relative(y, alone[name](given)) < 1e-12
    changed = torch.randn(2, 3, 24, dtype=torch.float64)
    attention.q_proj(changed)
    changed.mul_(2)
    assert relative(attention.k_proj(changed), alone["k_proj"](changed)) < 1e-12


def test_outputs_may_be_changed_in_place() -> None:
    ours, _ = pair("llama")
    attention = ours.model.layers[0].self_attn
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    found = []
    for change in (lambda y: y.mul_(3), lambda y: y * 3):
        x.grad = None
        q, k = attention.q_proj(x), attention.k_proj(x)
        (change(q).square().sum() + change(k.view(6, -1)).sum()).backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


def attach_like(layer: LoraLayer) -> LoraLayer:
    twin = copy.deepcopy(layer)
    twin.lora_siblings = None
    return twin


def test_a_copy_of_a_model_is_independent() -> None:
    ours, theirs = pair("llama")
    gradients(ours)
    gradients(ours)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for _ in range(2):
        compare(twin, theirs, 1e-10)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_in_one_graph() -> None:
    ours, theirs = pair("llama")
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compare(ours, theirs, 1e-10)


def test_autocast_gives_what_plain_operations_give() -> None:
    ours, theirs = pair("llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(ours), logits(theirs))


def test_frozen_first_input_and_partial_needs() -> None:
    layer = attach(torch.nn.Linear(8, 6), LoraSpec(2, 4.0))
    torch.nn.init.normal_(layer.lora_A.weight)
    torch.nn.init.normal_(layer.lora_B.weight)
    layer.lora_A.weight.requires_grad_(False)
    x = torch.randn(3, 8)
    layer(x).sum().backward()
    assert layer.lora_A.weight.grad is None
    assert layer.lora_B.weight.grad is not None
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None


def test_attach_twice_is_refused() -> None:
    model = tiny("llama")
    attach_all(model, {"lm_head": LoraSpec(2, 4.0)}, ())
    with pytest.raises(TypeError):
        attach(model.lm_head, LoraSpec(2, 4.0))
    with pytest.raises(TypeError):
        attach(model.model.norm, LoraSpec(2, 4.0))
    assert logits(model).shape == (*rows().shape, 67)
