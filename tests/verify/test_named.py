"""The twelve models by name, full and with LoRA, on FSDP and on FSDP with each of the others."""

from __future__ import annotations

import pytest

from tests.soak import by_turns
from tests.verify.models import PUBLIC, small
from tests.verify.proof import LAYOUTS, Proofs, right

pytestmark = [pytest.mark.filterwarnings("ignore")]

BOTH = [{"cp": 2, "pp": 2}, {"tp": 2, "pp": 2}]
DEEP = ["Llama-3.2-1B", "Mistral-7B-v0.1", "Qwen3-4B", "phi-2"]


@pytest.mark.parametrize(("name", "parallel", "lora"), by_turns(PUBLIC, LAYOUTS, "full", "LoRA"))
def test_a_layout_computes_what_plain_transformers_does(
    name: str, parallel: dict[str, int], lora: bool, proofs: Proofs
) -> None:
    right(proofs.cell(name, small(name), parallel, lora=lora))


@pytest.mark.parametrize(("name", "parallel", "lora"), by_turns(DEEP, BOTH, "full", "LoRA"))
def test_a_pipeline_of_parts_of_rows_or_of_tensors(
    name: str, parallel: dict[str, int], lora: bool, proofs: Proofs
) -> None:
    right(proofs.cell(name, small(name), parallel, lora=lora))
