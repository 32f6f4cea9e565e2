"""Attention over a packed row of which each of several ranks holds a part.

Where the query heads divide by the ranks, ranks trade positions for heads: each attends for its share of the heads over
the whole row, with the keys and values that these heads read, and trades back. Where they do not divide, every rank
gets all keys and values and attends from its own queries alone. Either way the model's own attention does the work, so
windows, soft caps and sinks are the model's own.

Source of the trade: Jacobs et al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from luthier.errors import ModelError
from luthier.hf.rows.documents import Documents, Exchange


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring queries of one document, and the keys that they may meet.

    Attributes:
        queries: where they are in the query tensor.
        rows: which positions of the row they are; row of the mask.
        keys: positions of the row whose keys they meet; the last query meets the last key.
    """

    queries: slice
    rows: slice
    keys: slice


Run = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""run(module, query, key, value, mask, options, pieces): attention where keys and values of the whole row are there."""


def attend_shared(
    run: Run,
    packed: Documents,
    exchange: Exchange,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention from this rank's positions to the whole row. All ranks that share the row call it.

    Args:
        run: attention over a whole row.
        packed: the documents of the whole row.
        exchange: what brings positions and heads together.
        module: the attention module.
        query: [1, heads, T / degree, head_dim].
        key: [1, kv_heads, T / degree, head_dim].
        value: [1, kv_heads, T / degree, value_dim].
        mask: bool [1, 1, T, T], or None where it is causal within each document.
        options: keyword arguments of the attention function.

    Returns:
        [1, T / degree, heads, value_dim].

    Raises:
        ModelError: the layer hands on numbers about single positions, which the other ranks do not have.
    """
    _refuse_numbers_of_positions(module, options)
    heads = query.shape[1]
    if heads % exchange.degree:
        ranks = range(exchange.degree)
        wanted = [[list(range(tensor.shape[1])) for _ in ranks] for tensor in (key, value)]
        key, value = exchange.to_heads((key, value), wanted)
        return run(module, query, key, value, mask, options, own_pieces(packed, exchange, mask is None))[0]
    share = heads // exchange.degree
    queries = [list(range(rank * share, (rank + 1) * share)) for rank in range(exchange.degree)]
    group = heads // key.shape[1]
    read = [sorted({head // group for head in own}) for own in queries]  # keys that a rank's query heads read
    query, key, value = exchange.to_heads((query, key, value), (queries, read, read))
    own = queries[exchange.rank]
    places = [read[exchange.rank].index(head // group) for head in own]
    groups = share // key.shape[1]
    if places != [place for place in range(key.shape[1]) for _ in range(groups)]:
        groups = 1  # the cut goes through a group of query heads that read one key
        key, value = key[:, places], value[:, places]
    view, options = _of_heads(module, options, own, heads, groups)
    return exchange.to_positions(run(view, query, key, value, mask, options, None)[0])


def own_pieces(packed: Documents, exchange: Exchange, causal: bool) -> list[Piece]:
    """This rank's queries, cut where documents begin and where the row goes on elsewhere.

    Args:
        packed: the documents of the whole row.
        exchange: says which positions this rank holds.
        causal: no query meets a later key, so a piece's keys end with its queries; else they are its whole document's.
    """
    return _pieces(packed.bounds, tuple(exchange.positions(packed.tokens).tolist()), causal)


@lru_cache(maxsize=16)  # all layers of a pass ask for the same
def _pieces(bounds: tuple[int, ...], held: tuple[int, ...], causal: bool) -> list[Piece]:
    pieces = []
    start = 0
    while start < len(held):
        first = held[start]
        document = next(span for span in pairwise(bounds) if span[0] <= first < span[1])
        stop = start + 1
        while stop < len(held) and held[stop] == held[stop - 1] + 1 and held[stop] < document[1]:
            stop += 1
        end = first + stop - start
        pieces.append(Piece(slice(start, stop), slice(first, end), slice(document[0], end if causal else document[1])))
        start = stop
    return pieces


def _of_heads(
    module: torch.nn.Module, options: dict[str, Any], heads: list[int], total: int, groups: int
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A view of an attention module, and its options, as they are for some of its heads.

    Attention functions read the number of query heads to a key, and numbers of each head such as sinks, from the
    module or from their arguments.

    Args:
        module: the whole module; stays as it is.
        options: keyword arguments of its attention function.
        heads: the query heads, neighbours.
        total: how many the module has.
        groups: query heads to a key in the view.
    """
    here = slice(heads[0], heads[-1] + 1)
    per_head = {
        name: given
        for name, given in options.items()
        if isinstance(given, torch.Tensor) and given.dim() == 1 and given.shape[0] == total
    }
    own = {name: given[here] for name, given in per_head.items()}
    view = object.__new__(type(module))  # shares every tensor; the module itself is not touched
    view.__dict__ = dict(module.__dict__)
    if hasattr(module, "num_key_value_groups"):
        view.__dict__["num_key_value_groups"] = groups
    for name, given in per_head.items():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is given:
                view.__dict__[attribute] = own[name]  # found before the parameter of this name
    return view, {**options, **own}


def _refuse_numbers_of_positions(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name, given in options.items():
        if isinstance(given, torch.Tensor) and given.dim() > 1 and name not in _NOT_READ:
            raise ModelError(
                f"{type(module).__name__} hands on {name}, made for the part of the row that one rank holds",
                where="parallel.cp",
                remedy="set it to 1",
            )


_NOT_READ = ("position_ids",)
"""Arguments that layers hand on for other attention functions than those that run here."""
