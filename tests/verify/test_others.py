"""Caps, windows, scales, fused projections and experts, full and with LoRA, on layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from luthier.hf.tiny import debug_config
from tests.verify.proof import Proofs, right
from tests.world import World

pytestmark = [pytest.mark.filterwarnings("ignore")]

LAYOUTS = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "pp": 2}]
KINDS = ["gemma2", "gemma3_text", "cohere2", "gpt2", "falcon"]
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory, world: Callable[[int], World]) -> Proofs:
    return Proofs(tmp_path_factory.mktemp("proofs"), world)


def said(parallel: dict[str, int]) -> str:
    return "-".join(f"{name}{degree}" for name, degree in parallel.items())


@pytest.mark.parametrize("parallel", LAYOUTS, ids=said)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_computes_what_plain_transformers_does(kind: str, parallel: dict[str, int], proofs: Proofs) -> None:
    for lora in (False, True):
        right(proofs.cell(kind, debug_config(kind), parallel, lora=lora))


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_on_two_ranks(kind: str, proofs: Proofs) -> None:
    for lora in (False, True):
        right(proofs.cell(kind, debug_config(kind), {"dp_shard": 2, "ep": 2}, lora=lora))
