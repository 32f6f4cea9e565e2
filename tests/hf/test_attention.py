"""Oracle: plain Transformers, each document alone, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.rows.attention import NAME, register_attention
from luthier.hf.rows.blocked_attention import blocked_attention
from luthier.hf.rows.documents import Documents, active_documents, documents, documents_of, is_channel

LENGTHS = [1, 9, 13, 2, 7]
ROUND_INSIDE = ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "helium", "llama4_text"]
"""Parts of these compute in fp32 whatever the model's dtype, so float64 proves them to 1e-6 only."""
TYPES = [
    *[
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "granite",
        "gpt2",
        "phi",
        "phi3",
        "mixtral",
        "qwen3_moe",
        "gpt_neox",
        "opt",
    ],
    *["olmo", "arcee", "ernie4_5", "starcoder2", "stablelm", "smollm3"],
    *ROUND_INSIDE,
]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def strong_model(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A plain model whose weights are so large that a fault of masks or positions shows."""
    config = debug_config(kind, **changes)
    extra = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    register_attention()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((0.2 * noise).to(dtype))
    return model


def run(
    model: Any, ids: torch.Tensor, lengths: list[int], packed: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [T, vocabulary] and gradients of a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    if packed:
        with documents(bounds(lengths)):
            logits = model(input_ids=ids, position_ids=positions(lengths), use_cache=False).logits[0]
    else:
        pieces = ids.split(lengths, dim=1)
        logits = torch.cat([model(input_ids=piece, use_cache=False).logits[0] for piece in pieces])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest difference over largest entry of each tensor; absolute, on the scale of all, where that is about zero."""
    assert got.keys() == want.keys()
    sizes = {name: reference.abs().max().item() for name, reference in want.items()}
    largest = max(sizes.values())
    return max(
        (got[name].double() - reference).abs().max().item()
        / (sizes[name] if sizes[name] > 1e-12 * largest else largest)
        for name, reference in want.items()
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", TYPES)
def test_packed_documents_are_each_document_alone(kind: str, checkpointing: bool) -> None:
    model = strong_model(kind)
    ids = torch.randint(3, 200, (1, sum(LENGTHS)))
    logits, want = run(model, ids, LENGTHS, packed=False)
    model.set_attn_implementation(NAME)
    if checkpointing:
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
    got_logits, got = run(model, ids, LENGTHS, packed=True)
    bound = 1e-6 if kind in ROUND_INSIDE else 1e-10
    assert worst({"logits": got_logits}, {"logits": logits}) < bound
    assert worst(got, want) < bound


@pytest.mark.parametrize("window", [2, 4, 64])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "cohere2", "qwen3"])
def test_sliding_windows_start_again_in_each_document(kind: str, window: int) -> None:
    changes: dict[str, Any] = {"sliding_window": window}
    if kind == "qwen3":
        changes |= {"use_sliding_window": True, "max_window_layers": 1}
    model = strong_model(kind, **changes)
    ids = torch.randint(3, 200, (1, sum(LENGTHS)))
    logits, want = run(model, ids, LENGTHS, packed=False)
    model.set_attn_implementation(NAME)
    got_logits, got = run(model, ids, LENGTHS, packed=True)
    bound = 1e-6 if kind in ROUND_INSIDE else 1e-10
    assert worst({"logits": got_logits}, {"logits": logits}) < bound
    assert worst(got, want) < bound


def test_without_documents_it_is_plain_sdpa_to_the_bit() -> None:
    plain = strong_model("qwen3", torch.float32).eval()
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation(NAME)
    ids = torch.randint(3, 200, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)
        assert torch.equal(ours(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
        arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(ours.generate(ids, **arguments), plain.generate(ids, **arguments))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_generation_of_models_that_need_their_own_attention(kind: str) -> None:
    plain = strong_model(kind, torch.float32).eval()
    ours = copy.deepcopy(plain)
    plain.set_attn_implementation("eager")
    ours.set_attn_implementation(NAME)
    ids = torch.randint(3, 200, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(ours.generate(ids, **arguments), plain.generate(ids, **arguments))


def test_attention_dropout_stays_within_documents() -> None:
    model = strong_model("llama", torch.float32, attention_dropout=0.5)
    model.set_attn_implementation(NAME)
    model.train()
    caught = []
    model.get_input_embeddings().register_forward_hook(lambda m, a, output: caught.append(output) or None)
    ids = torch.randint(3, 200, (1, sum(LENGTHS)))
    with documents(bounds(LENGTHS)):
        logits = model(input_ids=ids, position_ids=positions(LENGTHS), use_cache=False).logits[0]
        again = model(input_ids=ids, position_ids=positions(LENGTHS), use_cache=False).logits[0]
    assert not torch.equal(logits, again)
    (gradient,) = torch.autograd.grad(logits[10:23].sum(), caught[0])
    assert gradient[0, 10:23].any()
    assert not gradient[0, :10].any()
    assert not gradient[0, 23:].any()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 33, 32, 31, 64], [700, 3, 300]])
def test_blocked_attention_is_the_formula(
    dtype: torch.dtype, bound: float, heads: int, kv_heads: int, lengths: list[int]
) -> None:
    tokens = sum(lengths)
    query = torch.randn(1, heads, tokens, 8).to(dtype).requires_grad_()
    key = torch.randn(1, tokens, kv_heads, 8).transpose(1, 2).to(dtype).requires_grad_()
    value = torch.randn(1, kv_heads, tokens, 12).to(dtype).requires_grad_()
    gradient = torch.randn(1, tokens, heads, 12).to(dtype)
    got = blocked_attention(query, key, value, Documents.of(bounds(lengths)), 0.3)
    got.backward(gradient)
    exact = [leaf.detach().double().requires_grad_() for leaf in (query, key, value)]
    pieces = [leaf.split(lengths, dim=2) for leaf in exact]
    want = torch.cat(
        [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
            for q, k, v in zip(*pieces, strict=True)
        ],
        dim=1,
    )
    want.backward(gradient.double())
    assert got.is_contiguous()
    assert worst({"output": got.detach()}, {"output": want.detach()}) < bound
    for name, leaf, other in zip("qkv", (query, key, value), exact, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        size = other.grad.abs().max().item()
        floor = 1e-6 if tokens > len(lengths) or name == "v" else 1.0  # one key a query: no gradient for q and k
        assert (leaf.grad.double() - other.grad).abs().max().item() <= bound * max(size, floor), name


def test_documents_are_checked() -> None:
    for wrong in ([], [0], [1, 3], [0, 3, 3], [0, 5, 2]):
        with pytest.raises(ValueError, match="must rise from 0"):
            Documents.of(wrong)
    packed = Documents.of([0, 3, 4])
    assert (packed.tokens, packed.longest, packed.spans) == (4, 3, [(0, 3), (3, 4)])
    assert packed.index("cpu").tolist() == [0, 0, 0, 1]
    channel = packed.channel("cpu")
    assert is_channel(channel)
    assert documents_of(channel) == packed
    assert documents_of(channel.clone()) is not None  # read from its numbers


def test_documents_end_with_their_context() -> None:
    with documents([0, 3]) as outer:
        with documents(None):
            assert active_documents() is None
        assert active_documents() is outer
    assert active_documents() is None


def test_rows_that_are_not_the_documents_are_refused() -> None:
    model = strong_model("llama")
    model.set_attn_implementation(NAME)
    ids = torch.randint(3, 200, (1, 7))
    with documents([0, 3]), pytest.raises(ModelError, match="3 positions in all"):
        model(input_ids=ids, use_cache=False)
    with documents([0, 3, 7]), pytest.raises(ModelError, match="2 row"):
        model(input_ids=ids.expand(2, -1), use_cache=False)
