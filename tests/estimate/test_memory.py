"""Bytes that an estimate says a step takes, against those that tensors take on the ranks of real worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.config.sections import AdamWConfig
from luthier.estimate.memory import memory_of
from luthier.estimate.plan import Plan, held_by
from luthier.parallel.layout import Layout
from tests.estimate.layouts import save_config, step
from tests.estimate.test_traffic import LORA, prepared
from tests.world import World

SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
LENGTH = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2}, {"lora": LORA}),
        ({"dp_shard": 2}, {"lora": LORA | {"quantize": "nf4"}}),
        ({"dp_shard": 2}, {"checkpointing": "full"}),
        ({"tp": 2}, {}),
        ({"cp": 2}, {}),
        ({"pp": 2}, {"microbatches": 4}),
        ({"dp_shard": 2}, {"microbatches": 1, "in_backward": True}),
    ],
    ids=str,
)
def test_within_a_tenth(
    world: Callable[[int], World], model: Path, degrees: dict[str, int], how: dict[str, Any]
) -> None:
    lora, checkpointing = how.get("lora"), how.get("checkpointing", "off")
    microbatches = how.get("microbatches", 2)
    layout = Layout(**degrees)
    shape = prepared(model, lora).shape
    early = how.get("in_backward", False)
    plan = Plan(layout, LENGTH, 1, microbatches, checkpointing, reshard=layout.pp == 1, in_backward=early)
    optimizer = AdamWConfig(in_backward=early)
    given = {"length": LENGTH, "microbatches": microbatches, "lora": lora, "optimizer": optimizer}
    found = world(layout.ranks).run(step, str(model), degrees, activation_checkpointing=checkpointing, **given)
    for one in found:
        held = held_by(shape, layout.pp)[one["stage"]]
        assert memory_of(shape, plan, held).total == pytest.approx(one["peak"], rel=0.1)
