"""Packing and mixture: pure functions, checked against plain counting."""

from __future__ import annotations

import numpy as np
import pytest

from luthier.data.mixture import epoch_order, epoch_sizes
from luthier.data.packing import best_fit, deal, microbatches


@pytest.mark.parametrize("seed", range(8))
def test_best_fit_holds_every_row_once_and_fits(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 65, size=draw.integers(1, 400)).tolist()
    bins = best_fit(lengths, 64)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in rows) for rows in bins]
    assert max(sizes) <= 64
    # best-fit decreasing needs at most 11/9 of the best number of bins, plus one (Johnson 1973)
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 64) + 1 + sum(length > 32 for length in lengths)
    assert bins == best_fit(lengths, 64)


def test_best_fit_is_the_plain_rule():
    """The same as looking through all bins for the fullest one that has room."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 30, size=200).tolist()
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index in range(len(room)) if room[index] >= length]
        if fitting:
            best = min(fitting, key=lambda index: room[index])
            room[best] -= length
        else:
            room.append(40 - length)
    bins = best_fit(lengths, 40)
    assert sorted(40 - left for left in room) == sorted(sum(lengths[row] for row in rows) for rows in bins)


def test_a_row_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="65 tokens"):
        best_fit([65], 64)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_get_equally_many_microbatches(ranks, packing):
    draw = np.random.default_rng(ranks)
    for count in (1, 2, 7, 100):
        lengths = draw.integers(1, 65, size=count).tolist()
        dealt = microbatches(lengths, 64, packing, ranks)
        assert len(dealt) == ranks
        assert len({len(own) for own in dealt}) == 1
        rows = sorted(row for own in dealt for bin_ in own for row in bin_)
        assert rows == list(range(count))
        loads = [sum(lengths[row] for bin_ in own for row in bin_) for own in dealt]
        if count == 100:
            assert max(loads) - min(loads) <= 64
        if not packing:
            assert all(len(bin_) <= 1 for own in dealt for bin_ in own)


def test_few_tokens_still_give_every_rank_work():
    dealt = microbatches([10, 10, 10, 10], 64, True, 4)
    assert [len(own[0]) for own in dealt] == [1, 1, 1, 1]
    assert deal([[0]], [5], 3) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize(
    ("sizes", "weights", "wanted"),
    [
        ([10, 20], None, [10, 20]),
        ([100, 1000], [1.0, 1.0], [100, 100]),
        ([100, 1000], [1.0, 3.0], [100, 300]),
        ([1000, 10], [0.9, 0.1], [90, 10]),
        ([3, 1000], [0.999, 0.001], [3, 1]),
        ([5], [2.0], [5]),
        ([10, 0], [1.0, 1.0], [10, 0]),
    ],
)
def test_epoch_sizes(sizes, weights, wanted):
    assert epoch_sizes(sizes, weights) == wanted


def test_orders_follow_seed_and_epoch():
    one = epoch_order([50, 30], None, 1, 0, True)
    assert sorted(one) == list(range(80))
    assert one.tolist() == epoch_order([50, 30], None, 1, 0, True).tolist()
    assert one.tolist() != epoch_order([50, 30], None, 1, 1, True).tolist()
    assert one.tolist() != epoch_order([50, 30], None, 2, 0, True).tolist()
    assert epoch_order([50, 30], None, 1, 0, False).tolist() == list(range(80))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_goes_through_all_rows_before_any_comes_again(shuffle):
    sizes, weights = [10, 35], [1.0, 1.0]
    seen = []
    for epoch in range(7):
        order = epoch_order(sizes, weights, 3, epoch, shuffle)
        assert len(order) == 20
        assert sorted(row for row in order if row < 10) == list(range(10))
        seen += [row for row in order if row >= 10]
    assert sorted(seen) == sorted([*range(10, 45), *range(10, 45)])
    assert sorted(seen[:30]) != sorted(seen[30:60]) or not shuffle


def test_without_shuffling_the_sources_are_mixed_evenly():
    order = epoch_order([30, 10], [3.0, 1.0], 0, 0, False)
    for start in range(0, 40, 8):
        assert sum(row >= 30 for row in order[start : start + 8]) == 2
