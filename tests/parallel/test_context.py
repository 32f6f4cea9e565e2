"""Rows shared by 2 and 4 ranks against one process of plain Transformers, each document alone, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from luthier.adapters import apply_lora, finish_lora
from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from luthier.hf.forward import hidden_states, packing_is_exact
from luthier.hf.head import head_logits
from luthier.hf.load import build_on_meta, load_model, model_class
from luthier.hf.rows.documents import Documents
from luthier.hf.rows.shared_row import own_pieces
from luthier.hf.source import resolve
from luthier.parallel.checkpointing import checkpoint_activations
from luthier.parallel.context import cut, held_positions, join, prepare, refusal
from tests.adapters.models import PEFT_WARNINGS, disturb
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rope import LONGROPE
from tests.world import World

pytestmark = list(PEFT_WARNINGS)

NINE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
TWELVE = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
WINDOW = {"sliding_window": 5}


@dataclass(frozen=True)
class Kind:
    """A model: its type, what its config says otherwise, and where its adapters are.

    `bound` is 1e-6 for types that cast to fp32 inside, `alone` those that cannot be packed.
    """

    type: str
    changes: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    bound: float = 1e-10
    alone: bool = False


KINDS = {
    "qwen3": Kind("qwen3"),
    "llama_tied": Kind("llama", {"tie_word_embeddings": True}),
    "nine_heads": Kind("llama", NINE),
    "cut_groups": Kind("llama", TWELVE),
    "one_key": Kind("llama", {"num_key_value_heads": 1}),
    "gemma2": Kind("gemma2", WINDOW, bound=1e-6),
    "gemma2_six_heads": Kind("gemma2", WINDOW | SIX, bound=1e-6),
    "gemma3_text": Kind("gemma3_text", WINDOW, bound=1e-6),
    "cohere2": Kind("cohere2", WINDOW, bound=1e-6),
    "mistral": Kind("mistral", WINDOW),
    "mistral_six_heads": Kind("mistral", WINDOW | SIX),
    "granite": Kind("granite"),
    "gpt2": Kind("gpt2", targets=("c_attn", "c_proj")),
    "gpt_oss": Kind("gpt_oss", WINDOW, bound=1e-6),
    "gpt_oss_six_heads": Kind("gpt_oss", WINDOW | SIX, bound=1e-6),
    "deepseek_v3": Kind("deepseek_v3", targets=("q_b_proj", "kv_b_proj", "o_proj"), bound=1e-6),  # its router is fp32
    "qwen3_moe": Kind("qwen3_moe"),
    "phi": Kind("phi", targets=("q_proj", "k_proj", "v_proj", "dense")),
    "falcon": Kind("falcon", targets=("query_key_value", "dense")),
    "falcon_alibi": Kind("falcon", {"alibi": True}, alone=True),
    "bloom": Kind("bloom", targets=("query_key_value", "dense"), bound=1e-6, alone=True),
    "mpt": Kind("mpt", targets=("Wqkv", "out_proj"), bound=1e-6, alone=True),
    "stablelm": Kind("stablelm"),
    "phi3_long": Kind("phi3", LONGROPE, targets=("qkv_proj", "o_proj")),
    "llama4_text": Kind("llama4_text", {"attention_chunk_size": 5}, bound=1e-6),
}


def documents(lengths: list[int], seed: int) -> list[Sample]:
    generator = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        ids = generator.integers(4, 260, length + 1)
        weights = generator.choice([0.0, 1.0, 0.5], length + 1).astype(np.float32)
        samples.append(Sample.from_ids(ids, weights))
    return samples


def microbatches(alone: bool = False) -> list[list[Sample]]:
    """One of odd lengths, and one of which only the first two positions train: most ranks hold none of them."""
    second = documents([13], 1)[0]
    second.weights[:] = 0
    second.weights[:2] = 1
    first = documents([13, 1, 22, 7], 0)
    return [*([sample] for sample in first), [second]] if alone else [first, [second]]


def adapters(kind: Kind) -> LoraConfig:
    return LoraConfig(rank=4, alpha=6, target=list(kind.targets))


def on_shared_rows(path: Path, name: str, lora: bool, checkpointing: str) -> Any:
    """Loss, log-probabilities and gradients, summed over the ranks."""
    kind = KINDS[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def hook(model: Any) -> None:
        assert refusal(model, mesh.size()) is None
        if lora:
            apply_lora(model, adapters(kind), 0)
        prepare(model, mesh)
        checkpoint_activations(model, checkpointing)  # type: ignore[arg-type]

    model = load_model(resolve(str(path)), dtype="fp64", prepare=hook)
    if lora:
        finish_lora(model, adapters(kind), 0)
        disturb(model)
    model.train()
    total = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for samples in microbatches(kind.alone):
        batch = Batch.pack(samples)
        part = cut(batch, mesh)
        logits = head_logits(model, hidden_states(model, part))
        values = -F.cross_entropy(logits, part.targets[0], reduction="none")
        loss = -(values * part.weights[0]).sum()
        loss.backward()
        total += loss.detach()
        logprobs.append(join(values.detach(), mesh, batch.tokens))
    dist.all_reduce(total)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return float(total), torch.cat(logprobs), gradients if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def path(name: str) -> Path:
        if not (root / name).exists():
            save_strong(debug_config(KINDS[name].type, **KINDS[name].changes), root / name)
        return root / name

    return path


def compare(world: World, path: Path, name: str, lora: bool = False, checkpointing: str = "off") -> None:
    kind = KINDS[name]
    samples = [sample for group in microbatches() for sample in group]
    answers = world.run(on_shared_rows, path, name, lora, checkpointing)
    plain = plain_model(path, torch.float64)
    if lora:
        config = peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=list(kind.targets), fan_in_fan_out=kind.type == "gpt2"
        )
        plain = peft.get_peft_model(plain, config, autocast_adapter_dtype=False)
        disturb(plain)
    reference = weighted_sum(plain, samples)
    expected = {
        key.removeprefix("base_model.model.").replace(".default", ""): gradient
        for key, gradient in reference.gradients.items()
    }
    for loss, logprobs, _ in answers:
        assert loss == pytest.approx(reference.loss, rel=1e-12 if kind.bound < 1e-6 else 1e-7)
        assert (logprobs - torch.cat(reference.logprobs)).abs().max() < kind.bound * 10
    assert gradient_error(answers[0][2], expected) < kind.bound


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_shared_row_is_the_row(
    world: Callable[[int], World], saved: Callable[[str], Path], name: str, degree: int
) -> None:
    compare(world(degree), saved(name), name)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.changes in ({}, NINE, WINDOW)])
def test_adapters_on_a_shared_row(world: Callable[[int], World], saved: Callable[[str], Path], name: str) -> None:
    compare(world(2), saved(name), name, lora=True)


@pytest.mark.parametrize("name", ["qwen3", "nine_heads", "gemma2", "gpt_oss"])
def test_layers_may_be_computed_again(world: Callable[[int], World], saved: Callable[[str], Path], name: str) -> None:
    compare(world(2), saved(name), name, checkpointing="full")


def parts_and_wholes(tokens: int) -> Any:
    """What `cut` and `join` make of a row on this rank, and the gradient that `join` sends back."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    row = Batch.pack(documents([tokens - 3, 3], 0))
    part = cut(row, mesh)
    values = (part.targets[0] * 10.0).requires_grad_()
    joined = join(values, mesh, tokens)
    (joined * torch.arange(tokens)).sum().backward()
    assert values.grad is not None
    return part, joined.detach(), values.grad


@pytest.mark.parametrize(("degree", "tokens"), [(2, 9), (4, 24), (4, 25)])
def test_parts_are_even_and_join_to_the_row(world: Callable[[int], World], degree: int, tokens: int) -> None:
    row = Batch.pack(documents([tokens - 3, 3], 0))
    padded = row.padded(2 * degree)
    answers = world(degree).run(parts_and_wholes, tokens)
    held = []
    for rank, (part, joined, gradient) in enumerate(answers):
        here = held_positions(padded.tokens, degree, rank)
        held.append(here)
        assert part.tokens == padded.tokens // degree
        for name in ("input_ids", "position_ids", "targets", "weights"):
            assert torch.equal(getattr(part, name), getattr(padded, name)[:, here])
        assert torch.equal(part.cu_seqlens, padded.cu_seqlens)
        assert torch.equal(joined, row.targets[0] * 10.0)
        assert torch.equal(gradient, here.where(here < tokens, 0).double())
    assert torch.equal(torch.cat(held).sort().values, torch.arange(padded.tokens))
    work = [int(here.sum()) for here in held]  # keys that a causal row's queries meet
    assert max(work) == min(work)


class _Ranks:
    """Positions of a rank without any other rank."""

    def __init__(self, degree: int, rank: int) -> None:
        self.degree, self.rank = degree, rank

    def positions(self, tokens: int) -> torch.Tensor:
        return held_positions(tokens, self.degree, self.rank)


@pytest.mark.parametrize("causal", [True, False])
def test_pieces_hold_every_query_once_and_the_keys_of_its_document(causal: bool) -> None:
    row = Documents.of([0, 5, 6, 14, 16])
    seen = []
    for rank in range(4):
        ranks: Any = _Ranks(4, rank)
        held = held_positions(16, 4, rank)
        for piece in own_pieces(row, ranks, causal):
            queries = held[piece.queries].tolist()
            assert queries == list(range(16))[piece.rows]
            seen += queries
            start, stop = next(span for span in row.spans if span[0] <= queries[0] < span[1])
            assert queries[-1] < stop
            assert piece.keys == slice(start, queries[-1] + 1 if causal else stop)
    assert sorted(seen) == list(range(16))


def whole_rows(path: Path) -> bool:
    """A model made ready for parts still runs whole rows, each rank by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = load_model(resolve(str(path)), dtype="fp64", prepare=lambda model: prepare(model, mesh))
    return packing_is_exact(model)[0]


def test_whole_rows_need_no_exchange(world: Callable[[int], World], saved: Callable[[str], Path]) -> None:
    assert all(world(2).run(whole_rows, saved("qwen3")))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("mamba", "MambaForCausalLM has MambaBlock, through which each position sees those before it in order"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet, through which"),
        ("gpt_neo", "its forward refuses a part of a row (shape"),
        ("cpmant", "its positions meet, or find their places, outside its attention"),
        ("doge", "or see what only fills the row up"),
    ],
)
def test_architectures_that_need_the_whole_row_are_refused(kind: str, told: str) -> None:
    config = debug_config(kind)
    model = build_on_meta(model_class(resolve(f"debug:{kind}"), config), config)
    assert told in str(refusal(model, 2))
    assert refusal(model, 1) is None
