"""Oracles: the modules' own forwards, in float64 where rounding is at stake, and plain Transformers' gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from luthier.hf.allocator import tune_allocator
from luthier.hf.debug.tiny import debug_config
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.fast_mlp import silu_product
from luthier.hf.fast_norm import rms_norm
from luthier.hf.load import load_model
from luthier.hf.source import resolve


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return (weight + offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def relative(got: torch.Tensor | None, want: torch.Tensor) -> float:
    assert got is not None
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 32), (2, 7, 64), (1, 5, 4, 8)])
def test_norm_is_its_formula_with_its_gradients(
    dtype: torch.dtype, bound: float, offset: float, shape: tuple[int, ...]
) -> None:
    x = (torch.randn(shape) * 4 + 1).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1]).to(dtype).requires_grad_()
    gradient = torch.randn(shape).to(dtype)
    got = rms_norm(x, weight, 1e-6, offset)
    got.backward(gradient)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    want = formula(*exact, 1e-6, offset)
    want.backward(gradient.double())
    assert got.dtype == dtype
    assert relative(got, want) < bound
    for leaf, other in zip((x, weight), exact, strict=True):
        assert other.grad is not None
        assert relative(leaf.grad, other.grad) < bound


def test_norm_of_a_gradient_that_is_not_contiguous() -> None:
    x = torch.randn(1, 5, 4, 8, requires_grad=True)
    weight = torch.randn(8)
    gradient = torch.randn(1, 4, 5, 8)
    rms_norm(x, weight, 1e-6, 0.0).transpose(1, 2).backward(gradient)
    other = x.detach().clone().requires_grad_()
    formula(other, weight, 1e-6, 0.0).transpose(1, 2).backward(gradient)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_known_forms_are_told_apart(dtype: torch.dtype, device: str) -> None:
    with torch.device(device):
        model = torch.nn.ModuleList([LlamaRMSNorm(16), Gemma2RMSNorm(16)]).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    lines = accelerate_model(model)
    assert lines == ["1 LlamaRMSNorm by a faster or leaner forward", "1 Gemma2RMSNorm by a faster or leaner forward"]
    assert [name for name, _ in model.named_parameters()] == names
    assert [module.luthier_offset for module in model] == [0.0, 1.0]
    assert isinstance(model[0], LlamaRMSNorm)
    assert type(model[0]).__name__ == "LlamaRMSNorm"
    assert type(model[0]).__module__ == LlamaRMSNorm.__module__
    assert accelerate_model(model) == []  # done already


def test_what_computes_something_else_is_left_alone() -> None:
    class HalvingRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) / 2

    class RefusingRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    model = torch.nn.ModuleList([HalvingRMSNorm(16), RefusingRMSNorm(16), Qwen3NextRMSNormGated(16)])
    before = [type(module) for module in model]
    assert accelerate_model(model) == []
    assert [type(module) for module in model] == before


def test_float64_is_left_alone() -> None:
    model = LlamaRMSNorm(16).double()
    assert accelerate_model(torch.nn.ModuleList([model])) == []


def test_without_gradients_it_is_the_modules_own_to_the_bit() -> None:
    own = LlamaRMSNorm(64).to(torch.bfloat16)
    fast = copy.deepcopy(own)
    accelerate_model(torch.nn.ModuleList([fast]))
    x = torch.randn(33, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(fast(x), own(x))
    assert fast(x.requires_grad_()).grad_fn is not None
    assert "RmsNorm" in fast(x).grad_fn.name()


def test_weights_replaced_later_are_used() -> None:
    norm = LlamaRMSNorm(8)
    accelerate_model(torch.nn.ModuleList([norm]))
    norm.load_state_dict({"weight": torch.full((8,), 3.0)})
    x = torch.randn(2, 8, requires_grad=True)
    torch.testing.assert_close(norm(x), formula(x, torch.full((8,), 3.0), 1e-6, 0.0))
    norm.weight = torch.nn.Parameter(torch.full((8,), 5.0))
    torch.testing.assert_close(norm(x), formula(x, torch.full((8,), 5.0), 1e-6, 0.0))


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1].float().to(logits.dtype), ids[0, 1:]).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "llama"])
def test_a_model_is_no_further_from_float64_than_the_plain_one(kind: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    config = debug_config(kind)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    exact, fast = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    assert accelerate_model(fast)
    if checkpointing:
        fast.train()
        fast.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, config.vocab_size, (1, 17))
    want, own, got = (gradients(model, ids) for model in (exact, plain, fast))
    assert got.keys() == want.keys()
    for name, reference in want.items():
        scale = reference.abs().max()
        bound = max(2e-6, 1.5 * ((own[name] - reference).abs().max() / scale).item())
        assert ((got[name] - reference).abs().max() / scale).item() <= bound, name


@pytest.mark.parametrize("keep", [True, False])
def test_allocator_is_tuned_on_glibc(keep: bool) -> None:
    import platform

    assert tune_allocator(keep=keep) is (platform.system() == "Linux" and platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lean_product_is_autograds_own_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, gradient = (torch.randn(9, 33, generator=generator).mul(4).to(dtype) for _ in range(3))
    results = []
    for function in (silu_product, lambda g, u: torch.nn.functional.silu(g) * u):
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        output = function(*leaves)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_plain_gated_mlps_are_made_lean() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
            self.act_fn = torch.nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert accelerate_model(torch.nn.Sequential(Doubled())) == []
    plain = load_model(resolve("debug:llama"), dtype="fp32")
    assert any("LlamaMLP" in line for line in accelerate_model(plain))
    assert type(plain.model.layers[0].mlp).__name__ == "LlamaMLP"
