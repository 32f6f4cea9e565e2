"""Bytes that an estimate says are sent, against those that ranks of real worlds send: the same to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.config import RunConfig
from luthier.estimate.plan import Plan
from luthier.estimate.prepare import Prepared, prepare
from luthier.estimate.traffic import Flow, group, on_links, traffic
from luthier.parallel.layout import Layout
from tests.estimate.layouts import save_config, step
from tests.world import World

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
LENGTH = 64


def prepared(path: Path, lora: dict[str, Any] | None = None) -> Prepared:
    config = {"model": str(path), "data": {"sequence_length": 64}, "train": {"precision": "fp32", "device": "cpu"}}
    if lora is not None:
        config["adapter"] = lora
    return prepare(RunConfig.model_validate(config), cpu=True)


def expected(flows: list[Flow], layout: Layout, rank: int) -> dict[tuple[str, tuple[int, ...]], int]:
    """By operation and ranks of the group, as they are counted."""
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for flow in flows:
        size, distance = group(layout, flow.axis)
        first = rank - rank // distance % size * distance
        sent[flow.kind, tuple(first + place * distance for place in range(size))] += flow.sent
    return dict(sent)


def check(
    world: Callable[[int], World],
    path: Path,
    degrees: dict[str, int],
    *,
    lora: dict[str, Any] | None = None,
    reshard: str = "auto",
    checkpointing: str = "off",
    rows: int = 1,
    microbatches: int = 2,
    **how: Any,
) -> None:
    layout = Layout(**degrees)
    shape = prepared(path, lora).shape
    plan = Plan(
        layout,
        LENGTH,
        rows,
        microbatches,
        checkpointing,  # type: ignore[arg-type]
        reshard=reshard == "always" or (reshard == "auto" and layout.pp == 1),
        schedule=how.get("pipeline_schedule", "1f1b"),
        stages_per_rank=2 if "pipeline_schedule" in how else 1,
    )
    given = {"length": LENGTH, "rows": rows, "microbatches": microbatches, "lora": lora, "reshard": reshard, **how}
    if checkpointing != "off":
        given["activation_checkpointing"] = checkpointing
    for rank, found in enumerate(world(layout.ranks).run(step, str(path), degrees, **given)):
        assert found["sent"] == expected(traffic(shape, plan, found["stage"]), layout, rank), f"rank {rank}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("dense"), "qwen3", **SIZES)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token visits every expert, so that it is known what travels."""
    return save_config(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **SIZES, **EXPERTS)


LORA = {"rank": 4}


@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2}, {"reshard": "never"}),
        ({"dp_shard": 2}, {"checkpointing": "full"}),
        ({"dp_replicate": 2}, {}),
        ({"tp": 2}, {}),
        ({"cp": 2}, {"rows": 2}),
        ({"pp": 2}, {"microbatches": 3}),
    ],
    ids=str,
)
def test_messages(world: Callable[[int], World], dense: Path, degrees: dict[str, int], how: dict[str, Any]) -> None:
    check(world, dense, degrees, **how)


def test_messages_of_experts(world: Callable[[int], World], mixture: Path) -> None:
    check(world, mixture, {"dp_shard": 2, "ep": 2})


def test_links() -> None:
    layout = Layout(dp_replicate=2, dp_shard=8, tp=4)  # 64 ranks, 8 nodes of 8

    def links(axis: Any, kind: Any) -> tuple[float, float]:
        return on_links(layout, Flow("", kind, axis, "step", 800, 1), 8)

    assert links("tp", "all_reduce") == (800, 0)  # neighbours
    assert links("fsdp", "all_gather") == (400, 400)  # two in each of four nodes: every second hop leaves
    assert links("dp_replicate", "all_reduce") == (0, 800)
    assert links("fsdp", "all_to_all") == pytest.approx((800 / 7, 800 * 6 / 7))
