"""Tensor parallelism against unmodified Transformers in one process, and PEFT where adapters train; all in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import build_on_meta
from luthier.hf.plans import Section, tensor_plan
from luthier.parallel.tensor import refusal
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import gradient_errors, plain_model, save_strong, weighted_sum

pytestmark = list(PEFT_WARNINGS)

BOUND = 1e-10
FP32_INSIDE = {
    "gemma2": 1e-6,
    "cohere2": 1e-6,
    "mixtral": 1e-6,
    "gpt_neo": 1e-6,
    "mpt": 1e-6,
    "bloom": 1e-6,
    "deepseek_v3": 1e-6,
    "inkling_text": 1e-5,
}
"""Models that cast to fp32 somewhere."""

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama-odd": {"vocab_size": 97, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 5},
    "cohere2": {"sliding_window": 5},
    "mistral": {"sliding_window": 5},
    "phi": {},
    "phi3": {},
    "granite": {"tie_word_embeddings": True},
    "gpt2": {},
    "gpt_neox": {},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {
        "alibi": True,
        "num_kv_heads": 4,
        "multi_query": False,
        "new_decoder_architecture": False,
        "bias": True,
    },
    "bloom": {},
    "mpt": {},
    "opt": {},
    "gpt_bigcode": {},
    "gpt_bigcode-heads": {"multi_query": False},
    "gpt_neo": {},
    "stablelm": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "inkling_text": {},
}
ALONE = {
    "inkling_text",
    "bloom",
    "mpt",
    "falcon",
    "falcon-new",
    "falcon-alibi",
    "gpt_neo",
    "gpt_bigcode",
    "gpt_bigcode-heads",
}
"""Kinds whose documents cannot share a row."""
ADAPTED = {
    "llama-biased": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "llama-odd": ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"],
    "qwen3": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
LENGTHS = (9, 1, 14, 6, 11)


def rows(vocabulary: int) -> list[Sample]:
    generator = np.random.default_rng(5)
    found = []
    for length in LENGTHS:
        ids = generator.integers(4, min(vocabulary, 500), length + 1)
        weights = generator.choice([0.0, 1.0, 0.5], length + 1).astype(np.float32)
        found.append(Sample.from_ids(ids, weights))
    return found


def batches(samples: list[Sample], alone: bool) -> list[Batch]:
    """Microbatches whose weights are those of the whole."""
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    groups = [[sample] for sample in samples] if alone else [samples[:2], samples[2:]]
    return [Batch.pack(group).scaled(factor) for group in groups]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> a directory with a random model, made once."""
    return _Made(tmp_path_factory.mktemp("models"))


class _Made(dict[str, Path]):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> Path:
        config = debug_config(kind.partition("-")[0], **KINDS[kind])
        self[kind] = save_strong(config, self.root / kind)
        return self[kind]


def step(
    path: str,
    degree: int,
    samples: list[Sample],
    alone: bool,
    values: dict[str, Any],
    targets: list[str],
    sequence_parallel: bool = False,
) -> Any:
    """On every rank: loss, log-probabilities and whole gradients of accumulated microbatches, and what is exported."""
    from luthier.engine.evaluate import logprobs_of
    from luthier.engine.step import forward_backward_all
    from luthier.hf.shards import fill
    from luthier.parallel.norm import gradient_norm, settle
    from tests.parallel.cases import ready, whole

    adapter = LoraConfig(rank=3, alpha=6.0, target=targets) if targets else None
    state = ready(path, {"tp": degree}, adapter=adapter, sequence_parallel=sequence_parallel)
    parameters = dict(state.model.named_parameters())
    for name, value in values.items():
        fill(parameters[name], value)
    evaluated = logprobs_of(state, batches(samples, alone))
    outputs = forward_backward_all(state, batches(samples, alone))
    settle(state.trainable.values())
    return {
        "loss": sum(float(output.loss) for output in outputs),
        "logprobs": [output.logprobs for output in outputs],
        "evaluated": evaluated,
        "gradients": {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None},
        "norm": float(gradient_norm(state.trainable.values(), state.mesh)),
        "weights": {name: whole(p.detach()) for name, p in parameters.items()},
        "plain": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
    }


def compare(ranks: list[Any], reference: Any, bound: float) -> None:
    for rank in ranks:
        assert rank["plain"] == []
        assert abs(rank["loss"] - reference.loss) <= 1e-12 * abs(reference.loss) + (bound if bound > BOUND else 0)
        errors = gradient_errors(rank["gradients"], reference.gradients)
        assert {name: error for name, error in errors.items() if error > bound} == {}
        found = torch.cat(rank["logprobs"])
        expected = torch.cat(reference.logprobs)
        trained = found != 0
        assert torch.allclose(found[trained], expected[trained], rtol=0, atol=max(bound, 1e-12))
        assert torch.allclose(torch.cat(rank["evaluated"])[trained], expected[trained], rtol=0, atol=max(bound, 1e-12))
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in reference.gradients.values()]))
        assert abs(rank["norm"] / float(norm) - 1) < bound
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[-1]["weights"][name]), name


@pytest.mark.parametrize("kind", list(KINDS))
def test_full_gradients_equal_those_of_plain_transformers(kind: str, made: dict[str, Path], world: Any) -> None:
    bound = FP32_INSIDE.get(kind.partition("-")[0], BOUND)
    model = plain_model(made[kind], torch.float64).train()
    samples = rows(model.config.get_text_config().vocab_size)
    reference = weighted_sum(model, samples, 1 / sum(float(s.weights.sum()) for s in samples))
    ranks = world(2).run(step, str(made[kind]), 2, samples, kind in ALONE, {}, [])
    compare(ranks, reference, bound)
    stored = {name: p.detach() for name, p in model.named_parameters()}
    assert all(torch.equal(ranks[0]["weights"][name], value) for name, value in stored.items())


@pytest.mark.parametrize("kind", list(ADAPTED))
def test_adapter_gradients_equal_pefts(kind: str, made: dict[str, Path], world: Any) -> None:
    bound = FP32_INSIDE.get(kind.partition("-")[0], BOUND)
    base = plain_model(made[kind], torch.float64)
    transposed = kind == "gpt2"
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=ADAPTED[kind], fan_in_fan_out=transposed)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()
    values = {}
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
                values[plain(name)] = parameter.detach().clone()
    samples = rows(base.config.get_text_config().vocab_size)
    reference = weighted_sum(model, samples, 1 / sum(float(s.weights.sum()) for s in samples))
    reference.gradients = {plain(name): g for name, g in reference.gradients.items()}
    ranks = world(2).run(step, str(made[kind]), 2, samples, kind in ALONE, values, ADAPTED[kind])
    compare(ranks, reference, bound)


def plain(name: str) -> str:
    """Our name of one of PEFT's parameters."""
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


@pytest.mark.parametrize("kind", ["llama-odd", "gpt2"])
def test_four_ranks(kind: str, made: dict[str, Path], world: Any) -> None:
    path = made[kind]
    if kind == "llama-odd":  # as many key heads as ranks
        path = save_strong(debug_config("llama", vocab_size=97, num_key_value_heads=4), path.parent / "llama-four")
    model = plain_model(path, torch.float64).train()
    samples = rows(model.config.vocab_size)
    reference = weighted_sum(model, samples, 1 / sum(float(s.weights.sum()) for s in samples))
    compare(world(4).run(step, str(path), 4, samples, False, {}, []), reference, BOUND)


SLICED = ["llama-biased", "qwen3", "gemma2", "gpt2", "bloom", "falcon-new", "gpt_neox", "qwen3_moe", "deepseek_v3"]


@pytest.mark.parametrize("kind", SLICED)
def test_sequence_parallel_gradients_equal_those_of_plain_transformers(
    kind: str, made: dict[str, Path], world: Any
) -> None:
    bound = FP32_INSIDE.get(kind, BOUND)
    model = plain_model(made[kind], torch.float64).train()
    samples = rows(model.config.get_text_config().vocab_size)
    reference = weighted_sum(model, samples, 1 / sum(float(s.weights.sum()) for s in samples))
    ranks = world(2).run(step, str(made[kind]), 2, samples, kind in ALONE, {}, [], True)
    compare(ranks, reference, bound)


@pytest.mark.parametrize(
    ("kind", "changes", "degree", "reason"),
    [
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, 2, "9 attention heads"),
        ("llama", {}, 4, "2 key and value heads cannot be dealt to 4 ranks evenly"),
        ("llama", {"intermediate_size": 51}, 2, "51 outputs of gate_proj cannot be dealt to 2 ranks evenly"),
        ("mixtral", {"intermediate_size": 33}, 2, "33 inner features of an expert cannot be dealt to 2 ranks evenly"),
        ("gpt2", {"n_head": 1}, 2, "1 attention heads cannot be dealt to 2 ranks evenly"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 4, "2 key and value heads"),
        ("codegen", {"n_head": 8, "rotary_dim": 4}, 8, "its fused projection lies in 4 blocks"),
        ("mamba", {}, 2, "its layers have no attention heads and no feed-forward width"),
        ("hrm_text", {}, 2, "self_attn.q_proj.weight joined with others, along the side that would be cut"),
        ("inkling2_text", {}, 2, "mlp.experts.gate_up_proj joined with others, along the side that would be cut"),
        ("bitnet", {}, 2, "its layers have no attention heads and no feed-forward width"),
        ("doge", {}, 2, "DogeAttention holds A for all 2 key and value heads"),
        ("dory", {}, 2, "DoryMLP holds suv_gate for all 128 inner features"),
        ("gemma3n_text", {}, 2, "lets the largest of its inner features pass, by mean and deviation over all of them"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], degree: int, reason: str
) -> None:
    model = on_meta(kind, **changes)
    assert reason in str(refusal(model, degree))
    assert refusal(on_meta("llama", num_key_value_heads=4), 4) is None


def test_an_activation_that_lets_all_pass_may_be_cut() -> None:
    model = on_meta("gemma3n_text")
    for layer in model.model.layers:
        layer.mlp.activation_sparsity = 0.0
    assert refusal(model, 2) is None


def on_meta(kind: str, **changes: Any) -> Any:
    config = debug_config(kind, **changes)
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return build_on_meta(cls, config)


def test_a_plan_of_our_own_knows_what_a_fused_projection_holds() -> None:
    plan = tensor_plan(on_meta("gpt2"))
    assert plan.sections["transformer.h.0.attn.c_attn"] == (Section(64), Section(64), Section(64))
    assert plan.styles["transformer.h.0.attn.c_proj"] == "rowwise"
    assert plan.styles["transformer.h.1.mlp.c_fc.weight"] == "colwise"
    assert plan.divided["transformer.h.0.attn"] == ("num_heads", "split_size", "embed_dim")
    shared = tensor_plan(on_meta("gpt_bigcode")).sections["transformer.h.0.attn.c_attn"]
    assert shared == (Section(64), Section(16, shared=True), Section(16, shared=True))
    assert tensor_plan(on_meta("bloom")).sections == {}


def test_a_plan_names_nothing_that_is_gone() -> None:
    model = on_meta("llama")
    model.model.layers[1] = torch.nn.Identity()
    model.model.embed_tokens = torch.nn.Identity()
    assert all(".1." not in name and "embed" not in name for name in tensor_plan(model).styles)


def recomputed(path: str, samples: list[Sample], how: str) -> Any:
    """On every rank: gradients of a row, with layers that are computed again or compiled."""
    from luthier.engine.step import forward_backward_all
    from luthier.parallel.norm import settle
    from tests.parallel.cases import ready, whole

    adapter = LoraConfig(rank=3, alpha=6.0, target=["q_proj", "k_proj", "o_proj", "down_proj"])
    more: dict[str, Any] = {"activation_checkpointing": "full"} if "again" in how else {}
    state = ready(path, {"tp": 2}, adapter=adapter, sequence_parallel="slices" in how, attention="sdpa", **more)
    if "compiled" in how:
        state.model.model.layers[0].compile(fullgraph=True, backend="aot_eager")  # tracing takes 10 seconds a layer
    for layer in state.model.modules():
        if hasattr(layer, "lora_B"):
            torch.nn.init.constant_(layer.lora_B.weight.to_local(), 0.01)
    for sample in samples:
        forward_backward_all(state, [Batch.pack([sample])])
    settle(state.trainable.values())
    return {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}


@pytest.mark.parametrize(
    "how", ["again", "again slices", "compiled", pytest.param("compiled slices", marks=pytest.mark.soak)]
)
def test_layers_computed_again_or_compiled_give_the_same_gradients(how: str, made: dict[str, Path], world: Any) -> None:
    samples = [sample for sample in rows(500) if len(sample) > 1][:2]
    plainly = world(2).run(recomputed, str(made["qwen3"]), samples, "")
    for found, expected in zip(world(2).run(recomputed, str(made["qwen3"]), samples, how), plainly, strict=True):
        assert max(gradient_errors(found, expected).values()) < 1e-12
