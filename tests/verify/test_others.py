"""Caps, windows, scales, fused projections and experts, full and with LoRA, on layouts."""

from __future__ import annotations

import pytest

from luthier.hf.debug.tiny import debug_config
from tests.soak import by_turns
from tests.verify.proof import LAYOUTS, Proofs, right

pytestmark = [pytest.mark.filterwarnings("ignore")]

KINDS = ["gemma2", "gemma3_text", "cohere2", "gpt2", "falcon"]
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"]


@pytest.mark.parametrize(("kind", "parallel", "lora"), by_turns(KINDS, LAYOUTS, "full", "LoRA"))
def test_a_layout_computes_what_plain_transformers_does(
    kind: str, parallel: dict[str, int], lora: bool, proofs: Proofs
) -> None:
    right(proofs.cell(kind, debug_config(kind), parallel, lora=lora))


@pytest.mark.parametrize(("kind", "parallel", "lora"), by_turns(EXPERTS, [{"dp_shard": 2, "ep": 2}], "full", "LoRA"))
def test_experts_on_two_ranks(kind: str, parallel: dict[str, int], lora: bool, proofs: Proofs) -> None:
    right(proofs.cell(kind, debug_config(kind), parallel, lora=lora))


def test_a_model_that_keeps_its_head_and_most_of_its_arithmetic_in_fp32(proofs: Proofs) -> None:
    cell = proofs.cell("hy_v4", debug_config("hy_v4"), {"tp": 2}, lora=False)
    right(cell)
    assert cell.bounds is not None
    assert 1e-6 < cell.bounds.gradient <= 1e-4


def test_layers_of_experts_names_are_adapted_where_the_experts_themselves_cannot_be(proofs: Proofs) -> None:
    cell = proofs.cell("longcat_flash", debug_config("longcat_flash"), {"dp_shard": 2}, lora=True)
    right(cell)
    assert cell.measured is not None
    assert "gate_proj,up_proj,down_proj" in cell.measured["adapters"]
