"""Experts dealt to ranks, tokens travelling to them: the numbers of one process of plain Transformers and PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LongcatFlashForCausalLM, MixtralForCausalLM

from luthier.adapters import save_peft
from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import build_on_meta
from luthier.parallel.expert import refusal
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import measure, ready, strengthen

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIX = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"]
OTHERS = ["llama4_text", "jetmoe", "dbrx"]
"""Tokens come to their experts in other ways: sorted, or in equal numbers; or the experts lie end to end."""
TO_FP32 = {"deepseek_v3", "glm4_moe", "llama4_text"}
"""Those whose routers compute in fp32, whatever the model does."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    return {kind: save_strong(debug_config(kind), root / kind) for kind in SIX + OTHERS}


def bound(kind: str) -> float:
    return 1e-6 if kind in TO_FP32 else 1e-10


def factor() -> float:
    return 1 / sum(float(sample.weights.sum()) for sample in documents())


def reference(path: Path) -> Reference:
    return weighted_sum(plain_model(path, torch.float64), documents(), factor())


def check(results: list[dict[str, Any]], expected: Reference, limit: float) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    found: dict[str, torch.Tensor] = {}
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(expected.loss, rel=limit)
        assert result["validation"] == pytest.approx(expected.loss, rel=limit)
        assert result["norm"] == pytest.approx(norm, rel=limit)
        found |= result["gradients"]
    assert gradient_error(found, expected.gradients) < limit


@pytest.mark.parametrize("kind", SIX + OTHERS)
def test_two_ranks_with_rows_of_their_own(world: Any, models: dict[str, Path], kind: str) -> None:
    results = world(2).run(measure, models[kind], {"dp_shard": 2, "ep": 2}, documents())
    check(results, reference(models[kind]), bound(kind))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", {"dp_shard": 4, "ep": 4}),
        ("gpt_oss", {"dp_shard": 4, "ep": 2}),
        ("deepseek_v3", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        ("mixtral", {"dp_shard": 2, "tp": 2, "ep": 2}),
        ("olmoe", {"dp_shard": 2, "tp": 2, "ep": 4}),
        ("qwen3_moe", {"dp_shard": 2, "cp": 2, "ep": 4}),
        ("mixtral", {"dp_shard": 2, "pp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_four_ranks(world: Any, models: dict[str, Path], kind: str, layout: dict[str, int]) -> None:
    check(world(4).run(measure, models[kind], layout, documents()), reference(models[kind]), bound(kind))


@pytest.mark.parametrize("how", [{"activation_checkpointing": "full"}, {"reshard": "never"}])
def test_policies_change_no_number(world: Any, models: dict[str, Path], how: dict[str, Any]) -> None:
    results = world(2).run(measure, models["mixtral"], {"dp_shard": 2, "ep": 2}, documents(), **how)
    check(results, reference(models["mixtral"]), 1e-10)


def test_tensor_parallel_ranks_share_the_experts(world: Any, models: dict[str, Path]) -> None:
    check(
        world(2).run(measure, models["mixtral"], {"tp": 2, "ep": 2}, documents()), reference(models["mixtral"]), 1e-10
    )


def test_a_rank_that_no_token_visits(world: Any, models: dict[str, Path], tmp_path: Path) -> None:
    config = debug_config("gpt_oss")
    path = save_strong(config, tmp_path / "lonely")
    weights = load_file(path / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("router.bias"):
            value.copy_(torch.tensor([50.0, 50.0, -50.0, -50.0]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    check(world(2).run(measure, path, {"dp_shard": 2, "ep": 2}, documents()), reference(path), 1e-10)


def written(path: Path, layout: dict[str, int], lora: LoraConfig, directory: Path) -> None:
    """Write the adapter that `measure` gives to a model, from all ranks."""
    state = ready(path, layout, adapter=lora)
    strengthen(state)
    save_peft(state.model, directory, group=torch.distributed.group.WORLD)


def with_adapter(path: Path, directory: Path, tmp_path: Path) -> Reference:
    """What PEFT makes of an adapter; its gradients under our names, since they are laid out as the weights are."""
    plain = plain_model(path, torch.float64)
    model = peft.PeftModel.from_pretrained(plain, str(directory), is_trainable=True, autocast_adapter_dtype=False)
    return weighted_sum(model, documents(), factor())


def in_pefts_form(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our gradients by PEFT's names and shapes; the down projection is the outer of its two wrappers."""
    found = {}
    for name, gradient in gradients.items():
        name = f"base_model.model.{name}".replace(".weight", ".default.weight")
        if ".lora.gate_up_proj." in name or ".lora.down_proj." in name:
            name = name.replace(".lora.gate_up_proj.", ".base_layer.").replace(".lora.down_proj.", ".")
            a = ".lora_A." in name
            gradient = gradient.flatten(0, 1) if a else gradient.permute(1, 2, 0).flatten(1)
        found[name] = gradient
    return found


ATTENTION = {"deepseek_v3": ["q_b_proj", "kv_b_proj"]}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, {"dp_shard": 2, "ep": 2}) for kind in SIX]
    + [
        ("mixtral", {"dp_shard": 2}),
        ("mixtral", {"tp": 2}),
        ("gpt_oss", {"tp": 2, "ep": 2}),
        ("qwen3_moe", {"dp_shard": 2, "tp": 2, "ep": 2}),
        ("mixtral", {"dp_shard": 4, "ep": 2}),
    ],
    ids=str,
)
def test_adapters_equal_pefts(
    world: Any, models: dict[str, Path], kind: str, layout: dict[str, int], tmp_path: Path
) -> None:
    lora = LoraConfig(rank=4, target=[*ATTENTION.get(kind, ["attn"]), "experts"])
    ranks = math.prod(degree for name, degree in layout.items() if name != "ep")
    world(ranks).run(written, models[kind], layout, lora, tmp_path)
    results = world(ranks).run(measure, models[kind], layout, documents(), lora=lora)
    for result in results:
        result["gradients"] = in_pefts_form(result["gradients"])
    check(results, with_adapter(models[kind], tmp_path, tmp_path), bound(kind))


def test_what_cannot_be_dealt_is_refused() -> None:
    mixtral = build_on_meta(MixtralForCausalLM, debug_config("mixtral"))
    assert refusal(mixtral, 2) is None
    assert refusal(mixtral, 3) == "its 4 experts cannot be dealt to 3 ranks evenly"
    assert refusal(build_on_meta(LlamaForCausalLM, debug_config("llama")), 2) == "it has no experts"
    identities = build_on_meta(LongcatFlashForCausalLM, debug_config("longcat_flash"))
    assert "down_proj holds another number of experts" in str(refusal(identities, 2))
