"""Packing: the rows of one global batch, laid into as few microbatches as may be, and dealt out to the ranks.

Which rows a step trains on is decided before, so packing changes the cost of a step and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

Bins = list[list[int]]


def best_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Best-fit decreasing: each row, longest first, goes where the least room is left over.

    O(n log n): bins are looked up by the room that they have left. Rows of one length keep their order.

    >>> best_fit([3, 5, 2, 4], 8)
    [[1, 0], [3, 2]]

    Args:
        lengths: length of each row, at most `capacity`.
        capacity: most tokens of a bin.

    Returns:
        Indices of rows, bin by bin.
    """
    bins: Bins = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the rooms that some bin has, in rising order
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[row]
        if length > capacity:
            raise ValueError(f"a row of {length} tokens does not fit into {capacity}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[chosen].append(row)
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    return bins


def microbatches(lengths: Sequence[int], capacity: int, packing: bool, ranks: int = 1) -> list[Bins]:
    """The microbatches of every rank.

    Args:
        lengths: length of each row of the global batch.
        capacity: most tokens of a microbatch.
        packing: off: every row is a microbatch.
        ranks: how many share the batch.

    Returns:
        [ranks][microbatches][rows], equally many microbatches for each rank. A rank that is short of one gets an empty
        list: it has to take part with a microbatch of weight 0.
    """
    if not packing:
        return deal([[row] for row in range(len(lengths))], lengths, ranks)
    return deal(_even(lengths, capacity, ranks), lengths, ranks)


def _even(lengths: Sequence[int], capacity: int, ranks: int) -> Bins:
    """Bins, smaller ones where that gives all ranks work and makes no more rounds."""
    bins = best_fit(lengths, capacity)
    if ranks == 1:
        return bins
    rounds = -(-len(bins) // ranks)
    even = max(max(lengths), -(-sum(lengths) // (rounds * ranks)))
    for slack in (1.0, 1.05, 1.15, 1.3, 1.6):
        smaller = min(capacity, int(even * slack))
        tried = best_fit(lengths, smaller)
        if len(tried) <= rounds * ranks:
            return tried
    return bins


def deal(bins: Bins, lengths: Sequence[int], ranks: int) -> list[Bins]:
    """Bins to ranks, equally many each, tokens as even as may be: the largest first, to the rank with the fewest."""
    rounds = -(-len(bins) // ranks)
    sizes = [sum(lengths[row] for row in rows) for rows in bins]
    dealt: list[Bins] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(bins)), key=lambda item: -sizes[item]):
        rank = min((r for r in range(ranks) if len(dealt[r]) < rounds), key=lambda r: (loads[r], r))
        dealt[rank].append(bins[index])
        loads[rank] += sizes[index]
    return [[*own, *([] for _ in range(rounds - len(own)))] for own in dealt]
