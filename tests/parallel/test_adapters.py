"""Adapters on layouts, and beside them what is easily forgotten: one end of a tied pair, recomputation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import Reference, gradient_error, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import adapted_reference, measure, ready, whole

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning")]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYOUTS: list[dict[str, int]] = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"pp": 2, "dp_shard": 2}]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four layers, whose head is its embedding."""
    config = debug_config("llama", layers=4, tie_word_embeddings=True)
    return save_strong(config, tmp_path_factory.mktemp("models") / "tied")


def check(results: list[dict[str, Any]], expected: Reference) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=1e-10)
        together |= result["gradients"]
    assert gradient_error(together, expected.gradients) < 1e-10


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_end_of_a_tied_pair_trains_alone(world: Any, tied: Path, layout: dict[str, int], end: str) -> None:
    lora = LoraConfig(rank=4, target=["attn"], train_modules=[end])
    results = world(math.prod(layout.values())).run(measure, tied, layout, documents(), lora=lora)
    check(results, adapted_reference(tied, ATTENTION, trained=[end]))


def ends(layout: dict[str, int]) -> tuple[torch.Tensor, ...]:
    lora = LoraConfig(rank=4, target=["attn"], train_modules=["lm_head"])
    model = ready("debug:gemma2", layout, precision="fp32", adapter=lora).model
    return tuple(whole(model.get_parameter(name).detach()) for name in ("model.embed_tokens.weight", "lm_head.weight"))


def test_random_weights_are_those_of_the_tied_pair(world: Any) -> None:
    for embedding, head in world(2).run(ends, {"dp_shard": 2}):
        assert torch.equal(embedding, head)


def read_ends(path: Path, files: Path, layout: dict[str, int]) -> dict[str, torch.Tensor]:
    model = ready(path, layout, precision="fp32", adapter=LoraConfig(start_from=str(files))).model
    places = dict(model.named_parameters(remove_duplicate=False))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: whole(places[name].detach()).clone() for name in names if name in places}


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_both_ends_that_peft_has_parted_are_read_apart(
    world: Any, tied: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    ends = ["embed_tokens", "lm_head"]
    base = AutoModelForCausalLM.from_pretrained(tied)
    peft = get_peft_model(base, PeftLora(r=2, target_modules=["q_proj"], modules_to_save=ends))
    with torch.no_grad():
        peft.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    peft.save_pretrained(tmp_path)
    expected = {
        "model.embed_tokens.weight": base.model.embed_tokens.modules_to_save["default"].weight.detach(),
        "lm_head.weight": base.lm_head.modules_to_save["default"].weight.detach(),
    }
    assert not torch.equal(*expected.values())
    for found in world(2).run(read_ends, tied, tmp_path, layout):
        for name, value in found.items():
            assert torch.equal(value, expected[name].to(value.dtype)), name


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_on_shards_of_shards(world: Any, tied: Path, policy: str) -> None:
    lora = LoraConfig(rank=4, target=["attn"])
    layout = {"dp_shard": 2, "tp": 2}
    results = world(4).run(measure, tied, layout, documents(), lora=lora, activation_checkpointing=policy)
    assert not any(result["missing"] for result in results)
    check(results, adapted_reference(tied, ATTENTION))
