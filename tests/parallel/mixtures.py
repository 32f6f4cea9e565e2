"""Tiny mixtures of experts with strong weights, and what one process of plain Transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from luthier.batch import Batch, Sample
from tests.oracles.plain import Reference, plain_model, save_strong, weighted_sum

VOCABULARY = 67
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {**_GROUPS, **_LATENT, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 5},
    "glm4_moe": {**_GROUPS, "use_qk_norm": True},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8},
}
TO_FP32 = {"deepseek_v3", "glm4_moe"}
"""Those whose routers compute in fp32, whatever the model does."""


def bound(kind: str) -> float:
    """How far gradients may be from plain Transformers' in float64."""
    return 1e-6 if kind in TO_FP32 else 1e-10


def save(kind: str, directory: Path, **changes: Any) -> Path:
    """A float64 checkpoint."""
    return save_strong(config(kind, **changes), directory)


def config(kind: str, **changes: Any) -> Any:
    """The config of one of `KINDS`."""
    return AutoConfig.for_model(kind, **{**_SIZES, **KINDS[kind], **changes})


def samples(count: int, seed: int = 0) -> list[Sample]:
    """Documents of 4 to 9 tokens, some of them not trained on."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(5, 10, count):
        weights = (random.random(length) > 0.3).astype(np.float32)
        weights[-1] = 1.0
        made.append(Sample.from_ids(random.integers(3, VOCABULARY, length), weights))
    return made


def factor(rows: list[Sample]) -> float:
    """One over the weight of a global batch."""
    return 1.0 / sum(float(row.weights.sum()) for row in rows)


def reference(path: Path, rows: list[Sample]) -> Reference:
    """Loss and gradients of one process, each document alone."""
    return weighted_sum(plain_model(path, torch.float64), rows, factor(rows))


def dealt(rows: list[Sample], rank: int, ranks: int) -> Batch:
    """The part of a global batch that one of several ranks reads, packed; all parts differ in length."""
    mine = [row for index, row in enumerate(rows) if index % ranks == rank]
    return Batch.pack(mine).scaled(factor(rows))
