"""FSDP and HSDP: the numbers of plain Transformers in one process, full and with adapters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from tests.oracles.plain import Reference, gradient_error, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import adapted_reference, measure, reference

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TYPES = {"llama": 1e-10, "qwen3": 1e-10, "gemma2": 1e-6, "gpt2": 1e-10, "mixtral": 1e-6}
LORA = LoraConfig(rank=4, target=["attn"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_strong(debug_config(kind), root / kind) for kind in TYPES}


def check(results: list[dict[str, Any]], expected: Reference, bound: float) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=bound)
        assert gradient_error(result["gradients"], expected.gradients) < bound


@pytest.mark.parametrize("kind", TYPES)
def test_two_shards(world: Any, models: dict[str, Path], kind: str) -> None:
    check(world(2).run(measure, models[kind], {"dp_shard": 2}, documents()), reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize("layout", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}])
def test_replicas_and_shards(world: Any, models: dict[str, Path], layout: dict[str, int]) -> None:
    check(world(4).run(measure, models["qwen3"], layout, documents()), reference(models["qwen3"]), 1e-10)


@pytest.mark.parametrize("how", [{"reshard": "never"}, {"activation_checkpointing": "full"}, {"cpu_offload": False}])
def test_policies_change_no_number(world: Any, models: dict[str, Path], how: dict[str, Any]) -> None:
    results = world(2).run(measure, models["llama"], {"dp_shard": 2}, documents(), **how)
    check(results, reference(models["llama"]), 1e-10)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_adapters_equal_peft(world: Any, models: dict[str, Path], kind: str) -> None:
    results = world(2).run(measure, models[kind], {"dp_shard": 2}, documents(), lora=LORA)
    names = {"qwen3": ["q_proj", "k_proj", "v_proj", "o_proj"], "gpt2": ["attn.c_attn", "attn.c_proj"]}[kind]
    expected = adapted_reference(models[kind], names, fan_in_fan_out=kind == "gpt2")
    check(results, expected, 1e-10)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])  # gemma2 ties its head
def test_random_weights_are_those_of_one_process(world: Any, kind: str) -> None:
    from luthier.hf.load import load_model
    from luthier.hf.source import resolve

    one = dict(load_model(resolve(f"debug:{kind}"), seed=3).named_parameters())
    for weights in world(2).run(initial, f"debug:{kind}", {"dp_shard": 2}, seed=3):
        assert weights.keys() == one.keys()
        assert all(torch.equal(value, one[name]) for name, value in weights.items())


def initial(model: str, layout: dict[str, int], *, seed: int) -> dict[str, torch.Tensor]:
    from tests.parallel.cases import ready, whole

    state = ready(model, layout, precision="fp32", seed=seed)
    return {name: whole(parameter.detach()) for name, parameter in state.model.named_parameters()}
