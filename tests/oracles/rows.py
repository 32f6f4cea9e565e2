"""Rows for tests of numbers: odd lengths, some of whose targets are not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from luthier.batch import Sample

LENGTHS = [23, 1, 40, 7, 12, 9, 18, 31]


def documents(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Rows of odd lengths, some of whose targets are not trained on."""
    generator = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        ids = generator.integers(4, 260, length + 1)
        weights = generator.choice([0.0, 1.0, 0.5], length + 1).astype(np.float32)
        samples.append(Sample.from_ids(ids, weights, f"row {len(samples)}"))
    return samples
