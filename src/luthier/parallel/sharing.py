"""A row that is shared: two ways in which a model can do it, and the proof, on a small one of its kind, that it can.

- "heads": the model runs on a part of the row, and its attention function, which it looks up by name, trades positions
  for heads with the other ranks. Needs positions to meet in that function alone, and each to know its place from
  `position_ids` alone.
- "modules": masks and positions are made for the whole row, layers run on a part of it, and the attention module of
  each, whatever it computes, runs on the hidden states of the whole row. Every rank does all the attention, so this
  saves what lies outside it; it is for architectures that know their attention by no name.

To try a way, one process runs the small model on the positions of a row in disorder, with an exchange that brings them
into order for attention, as ranks do with their parts: hidden states must be those of the row in order. So no
architecture is named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from luthier.batch import Batch, Sample
from luthier.errors import ModelError, first_line
from luthier.hf.anatomy import backbone_name, describe
from luthier.hf.debug.small import Kind, kind_of, make_small
from luthier.hf.forward import hidden_states, packing_is_exact
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.rows.attention import NAME
from luthier.hf.rows.documents import Exchange, active_documents, documents, row_tokens

Manner = Literal["heads", "modules"]

_LENGTHS = (5, 23, 5)
"""Of documents; together no even number, since most rows are filled up before they are shared."""
_TOLERANCE = 1e-4
"""Of the largest entry, in fp32. What is out of place is off by far more."""


def share(model: Any, exchange: Exchange, manner: Manner) -> list[Any]:
    """Make a model run on parts of rows, in place.

    Args:
        model: a Transformers model, on meta or loaded.
        exchange: between the ranks that share each row.
        manner: which way.

    Returns:
        handles whose `remove()` undoes it.
    """
    backbone = getattr(model, backbone_name(model))
    if manner == "heads":
        hooks = _Rows(exchange)
        return [
            backbone.register_forward_pre_hook(hooks.enter, with_kwargs=True),
            backbone.register_forward_hook(hooks.leave, with_kwargs=True, always_call=True),
        ]
    around = _Around(exchange)
    anatomy = describe(model)
    first = model.get_submodule(anatomy.layers[0])
    handles = [
        backbone.register_forward_pre_hook(around.enter, with_kwargs=True),
        first.register_forward_pre_hook(around.cut, with_kwargs=True),
    ]
    for name in anatomy.layers:
        layer = model.get_submodule(name)
        inside = {path[len(name) + 1 :].split(".")[0] for path in anatomy.attn if path.startswith(f"{name}.")}
        for child in sorted(inside):
            handles.append(layer.get_submodule(child).register_forward_pre_hook(around.gather, with_kwargs=True))
            handles.append(layer.get_submodule(child).register_forward_hook(around.part))
    return handles


class _Rows:
    """Hooks of a backbone that tell attention, for one forward pass, that a row is shared."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open: list[Any] = []

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        row, given = active_documents(), _given(arguments, options)
        shared = row is not None and given.shape[1] * self._exchange.degree == row.tokens
        context = documents(replace(row, exchange=self._exchange) if row is not None and shared else row)
        context.__enter__()
        self._open.append(context)
        if shared:
            # Without a mask Transformers would look for documents in this part of the row and cut them at its ends.
            options = {**options, "attention_mask": given.new_ones(given.shape[:2], dtype=torch.bool)}
        return arguments, options

    def leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def _given(arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """The ids or embeddings that a backbone is given, [1, positions, ...]."""
    given: list[Any] = [options.get("input_ids"), options.get("inputs_embeds"), *arguments]
    return next(value for value in given if isinstance(value, torch.Tensor))


class _Around:
    """Hooks that give a backbone the whole row, its layers a part, and their attention modules the whole again."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tokens: int | None = None  # of the row of the last pass that was shared; all in flight have one length

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tokens = row_tokens()
        self._tokens = tokens if _given(arguments, options).shape[1] * self._exchange.degree == tokens else None
        if self._tokens is None:
            return arguments, options
        options = {name: self._whole(value, (2, 3)) for name, value in options.items()}
        return tuple(self._whole(value, (2, 3)) for value in arguments), options

    @torch.compiler.disable
    def cut(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._tokens is None:
            return arguments, options
        if arguments:
            return (self._part(arguments[0]), *arguments[1:]), options
        return arguments, {n: self._part(value) if n == "hidden_states" else value for n, value in options.items()}

    @torch.compiler.disable
    def gather(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._tokens is None:
            return arguments, options
        return tuple(map(self._whole, arguments)), {name: self._whole(value) for name, value in options.items()}

    @torch.compiler.disable
    def part(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if self._tokens is None:
            return output
        return tuple(map(self._part, output)) if isinstance(output, tuple) else self._part(output)

    def _whole(self, value: Any, dims: tuple[int, ...] = (3,)) -> Any:
        """[1, T / degree, width], or without a width, to the same of the whole row; anything else as it is."""
        assert self._tokens is not None
        held = self._tokens // self._exchange.degree
        if not isinstance(value, torch.Tensor) or value.dim() not in dims or value.shape[:2] != (1, held):
            return value
        heads = value.reshape(1, 1, held, -1)
        (whole,) = self._exchange.to_heads((heads,), [[[0]] * self._exchange.degree])
        return whole.reshape(1, self._tokens, *value.shape[2:])

    def _part(self, value: Any) -> Any:
        """[1, T, width] to [1, T / degree, width]; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.dim() != 3 or value.shape[:2] != (1, self._tokens):
            return value
        return value[:, self._exchange.positions(value.shape[1]).to(value.device)]


def manner_of(model: Any) -> tuple[Manner | None, str]:
    """The way in which rows of a model can be shared, or None and the reason as a clause.

    Args:
        model: whole, perhaps on meta.
    """
    return _tried(kind_of(model))


@lru_cache(maxsize=8)
def _tried(kind: Kind) -> tuple[Manner | None, str]:
    try:
        small = make_small(kind)
    except ModelError as error:
        return None, error.what
    with torch.no_grad():
        packed, _ = packing_is_exact(small)
        lengths = _LENGTHS if packed else (sum(_LENGTHS),)
        reason = _try(small, "heads", lengths) if kind.attention == NAME else ""
        if reason is None:
            return "heads", ""
        other = _try(small, "modules", lengths)
        return ("modules", "") if other is None else (None, reason or other)


def _try(model: Any, manner: Manner, lengths: tuple[int, ...]) -> str | None:
    """Run a row in order and in disorder; what is wrong, if anything."""
    random = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    samples = [Sample.from_ids(random.integers(2, vocabulary, n + 1), np.ones(n + 1)) for n in lengths]
    alone = Batch.pack(samples)
    row = alone.padded(4)
    order = torch.from_numpy(random.permutation(row.tokens))
    expected = hidden_states(model, alone)
    try:
        with _shared(model, _Disorder(order), manner):
            found = hidden_states(model, _places(row, order))[order.argsort()]
        with _shared(model, _Half(), manner):  # for its shapes alone
            hidden_states(model, _places(row, torch.arange(row.tokens // 2)))
    except RAISED_BY_MODELS as error:
        return f"its forward refuses a part of a row ({first_line(error)})"
    off = float((found[: alone.tokens] - expected).abs().max() / expected.abs().max())
    if not off <= _TOLERANCE:
        return "its positions meet, or find their places, outside its attention, or see what only fills the row up"
    return None


def _places(row: Batch, where: torch.Tensor) -> Batch:
    return replace(row, input_ids=row.input_ids[:, where], position_ids=row.position_ids[:, where])


@contextmanager
def _shared(model: Any, exchange: Exchange, manner: Manner) -> Iterator[None]:
    handles = share(model, exchange, manner)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Disorder:
    """An `Exchange` of one rank, which holds a whole row, its positions in any order."""

    degree, rank = 1, 0

    def __init__(self, order: torch.Tensor) -> None:
        self._order, self._back = order, order.argsort()

    def positions(self, tokens: int) -> torch.Tensor:
        return self._order

    def to_heads(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[:, :, self._back] for tensor in tensors)

    def to_positions(self, output: torch.Tensor) -> torch.Tensor:
        return output[:, self._order]


class _Half:
    """An `Exchange` of two ranks, of which the other one holds zeros."""

    degree, rank = 2, 0

    def positions(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens // 2)

    def to_heads(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        own = [tensor[:, list(heads[0])] for tensor, heads in zip(tensors, wanted, strict=True)]
        return tuple(torch.cat([tensor, torch.zeros_like(tensor)], 2) for tensor in own)

    def to_positions(self, output: torch.Tensor) -> torch.Tensor:
        held = output[:, : output.shape[1] // 2]
        return torch.cat([held, torch.zeros_like(held)], 2)
