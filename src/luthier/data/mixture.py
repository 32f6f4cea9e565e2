"""Which rows an epoch has, and in which order: a pure function of the sizes, the weights, the seed and the epoch.

If no source names a weight, an epoch is every row of every source. If one does, the rows of an epoch have the shares
that the weights ask for: the source that is smallest for its share gives all its rows once, and every other one gives
as many as its share allows. Over the epochs each source goes through all its rows, in an order drawn anew for each
pass, before any comes again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ORDER, _PASS = 1, 2
"""Kinds of random numbers; each has a stream of its own."""


def epoch_sizes(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Rows that each source gives to an epoch.

    >>> epoch_sizes([100, 1000], None)
    [100, 1000]
    >>> epoch_sizes([100, 1000], [1.0, 3.0])
    [100, 300]

    Args:
        sizes: rows of each source.
        weights: shares; None for all rows of all sources.
    """
    if weights is None:
        return list(sizes)
    # as many epochs' worth of the whole mixture as the scarcest source can fill
    scale = min((size / weight for size, weight in zip(sizes, weights, strict=True) if size), default=0.0)
    return [
        max(1, min(size, int(scale * weight + 1e-6))) if size else 0
        for size, weight in zip(sizes, weights, strict=True)
    ]


def epoch_order(
    sizes: Sequence[int], weights: Sequence[float] | None, seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    """The rows of an epoch in the order they are trained on, numbered over all sources.

    Args:
        sizes: rows of each source; source s has the numbers sum(sizes[:s]) to sum(sizes[:s + 1]) - 1.
        weights: shares, or None.
        seed: decides all orders.
        epoch: counted from 0.
        shuffle: a drawn order; otherwise each source's own, and the sources evenly mixed if they have weights.

    Returns:
        int64 [rows of an epoch].
    """
    taken = epoch_sizes(sizes, weights)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parts = [
        offset + _slice(size, count, number, seed, epoch, shuffle)
        for number, (offset, size, count) in enumerate(zip(offsets[:-1], sizes, taken, strict=True))
    ]
    order = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if shuffle:
        return np.random.default_rng([_ORDER, seed, epoch]).permutation(order)
    if weights is None:
        return order
    # row i of n stands at (i + 1/2) / n of the epoch, so that every stretch has the shares of the whole
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in taken if count])
    return order[np.argsort(places, kind="stable")]


def _slice(size: int, count: int, source: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Rows `epoch * count` to `(epoch + 1) * count` of a source that is gone through again and again."""
    start, end = epoch * count, (epoch + 1) * count
    parts = []
    while start < end:
        turn, place = divmod(start, size)
        until = min(size, place + end - start)
        whole = not shuffle or (place == 0 and until == size)
        # an epoch that takes all rows gets its order later, for all sources together
        rows = np.arange(size) if whole else np.random.default_rng([_PASS, seed, source, turn]).permutation(size)
        parts.append(rows[place:until])
        start += until - place
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
