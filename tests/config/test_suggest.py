"""The nearest key is the one that was meant."""

from __future__ import annotations

import pytest

from luthier.config import RunConfig
from luthier.config.shape import known_paths, shape_of
from luthier.config.suggest import ELSEWHERE, nearest_key

KNOWN = sorted(set(known_paths(shape_of(RunConfig))))


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ((), "modle", "model"),
        ((), "learning_rate", "optimizer.learning_rate"),
        ((), "Learning-Rate", "optimizer.learning_rate"),
        ((), "batch_size", "train.rows_per_step"),
        ((), "sequence_lenght", "data.sequence_length"),
        (("train",), "step", "train.steps"),
        (("train",), "warmup", "schedule.warmup"),
        (("adapter",), "r", None),
        (("adapter",), "lora_alpha", "adapter.alpha"),
        (("data", "train"), "colum", "data.train.column"),
        (("data",), "seq_len", "data.sequence_length"),
        ((), "zzz", None),
    ],
)
def test_nearest_key(section: tuple[str, ...], key: str, meant: str | None) -> None:
    assert nearest_key(section, key, KNOWN) == meant


def test_words_of_other_tools_lead_to_keys_there_are() -> None:
    assert set(ELSEWHERE.values()) <= set(KNOWN)
    assert not set(ELSEWHERE) & set(KNOWN)
