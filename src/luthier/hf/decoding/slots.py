"""Texts that grow side by side, a token each at a time, by the modules of a model that may be in training.

Each text has a row of one cache, [rows, heads, positions, dim] a layer, its position p at place p; so texts of any
lengths stand together without padding between them, and one can leave or join while the others go on. The model's own
forward runs: while it does, its attention is "luthier_slots", whose mask function asks the model's own, window or not,
about the place of each row's token, and whose attention is the model's own over the row's keys.

What one row gets does not depend on the others, to the bit. Libraries sum a row of a matrix product in another order
where there are fewer or more rows, so products are padded to a number of rows that was tried on the model itself
(`settle`); each token comes to a mixture of experts alone; keys are as many as a multiple of `BLOCK`; and the places
that a row has not reached hold zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from luthier.errors import ModelError
from luthier.hf.anatomy import backbone_name
from luthier.hf.experts import Call, find_experts
from luthier.hf.head import head_logits
from luthier.hf.rows import attention as luthier_attention

NAME = "luthier_slots"
FEWEST = 4
"""Rows of the smallest product that is tried."""
BLOCK = 64
"""Keys are padded to a multiple of this many places."""


@dataclass(slots=True)
class Prefix:
    """A text that has been read.

    Attributes:
        tokens: its ids.
        hidden: [T, hidden], what the model's head reads at each position.
        state: what the rows that read it go on from; theirs alone to look into.
    """

    tokens: tuple[int, ...]
    hidden: Tensor
    state: Any


class Rows(Protocol):
    """Texts that grow side by side. Rows are numbered from 0 and stand close."""

    def read(self, tokens: Sequence[int]) -> Prefix:
        """Run the model over a whole text; touches no row."""
        ...

    def place(self, row: int, prefix: Prefix) -> None:
        """Let a row go on from a text that was read; the prefix may be placed again."""
        ...

    def move(self, source: int, target: int) -> None:
        """Give one row's text to another row."""
        ...

    def settle(self, most: int) -> None:
        """Find out how many rows products must be of, for up to so many texts; before any is placed."""
        ...

    def company(self, count: int) -> int:
        """How many rows the products of `count` texts are of; where fewer, as many products as it takes."""
        ...

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each of the first rows.

        Args:
            tokens: one id for each row.

        Returns:
            [rows, hidden], what the head reads at the tokens' positions.
        """
        ...


class _Reading(Cache):
    """Keeps the keys and values of one run over a whole text, and hands them on as they come."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.kept:
            raise ModelError(f"layer {layer_idx} keeps more than one set of keys", where="sampling")
        self.kept[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Slots(Cache):
    """The cache of all rows, as layers see it in one step of some of them.

    Attributes:
        rows: how many rows there is room for.
        places: how many positions there is room for, a multiple of `BLOCK`.
        first: the first row of the step.
        positions: int64 [count], on the device: where each row's new token stands.
        size: how many rows the model is run on; those after the first `count` are padding.
        length: how many keys a row meets.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.rows, self.places = FEWEST, BLOCK
        self.first, self.size, self.length = 0, FEWEST, BLOCK
        self.positions = torch.empty(0, dtype=torch.int64)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        count = len(self.positions)
        rows = torch.arange(self.first, self.first + count, device=key_states.device)
        found = []
        for arena, new in ((self.keys, key_states), (self.values, value_states)):
            tensor = self.arena(arena, layer_idx, new)
            tensor[rows, :, self.positions] = new[:count, :, 0]
            found.append(tensor[self.first : self.first + self.size, :, : self.length])
        return found[0], found[1]

    def arena(self, tensors: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        """[rows, heads, places, dim] of a layer, made when it is first asked for; a model may change its dtype."""
        if layer not in tensors:
            tensors[layer] = like.new_zeros(self.rows, like.shape[1], self.places, like.shape[3])
        elif tensors[layer].dtype != like.dtype:
            tensors[layer] = tensors[layer].to(like.dtype)
        return tensors[layer]

    def make_room(self, rows: int, places: int) -> None:
        """Let there be room for so many, and as much again where there was too little: all of it is copied."""
        if rows <= self.rows and places <= self.places:
            return
        if rows > self.rows:
            self.rows = max(rows, self.rows + self.rows // 2)
        if places > self.places:
            self.places = max(rounded(places), 2 * self.places)
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                new = old.new_zeros(self.rows, old.shape[1], self.places, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - 1


_ACTIVE: ContextVar[_Slots | None] = ContextVar("luthier_slots", default=None)


def _mask(*, mask_function: Any, device: torch.device | str = "cpu", **kwargs: Any) -> Tensor:
    """The mask function of "luthier_slots": bool [size, 1, 1, keys], which keys the token of each row meets."""
    slots = _ACTIVE.get()
    if slots is None or kwargs.get("attention_mask") is not None:
        raise ModelError("the model makes a mask of its own", where="sampling")
    rows = torch.arange(slots.size, device=device).view(-1, 1, 1, 1)
    queries = slots.positions.new_zeros(slots.size)
    queries[: len(slots.positions)] = slots.positions
    keys = torch.arange(slots.length, device=device).view(1, 1, 1, -1)
    seen = mask_function(rows, torch.zeros_like(rows), queries.view(-1, 1, 1, 1), keys)
    return cast(Tensor, seen).expand(slots.size, 1, 1, slots.length)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function of "luthier_slots": the model's own, with a mask in any case, for rows that are texts."""
    slots = _ACTIVE.get()
    if slots is None or attention_mask is None or attention_mask.shape[-1] != slots.length:
        raise ModelError("the model did not hand on the mask that was made for its texts", where="sampling")
    count = len(slots.positions)
    inputs = [tensor[:count] for tensor in (query, key, value, attention_mask)]
    found = luthier_attention.attention(module, *inputs, **kwargs)[0]
    output = found.new_zeros(len(query), *found.shape[1:])
    output[:count] = found
    return output, None


class SlotRows:
    """`Rows` by one cache for all of them.

    Args:
        model: a causal language model that takes its attention by name and keeps keys and values alone; whether it
            does is `decoding`'s to find out. It is called as it is: in which mode is the caller's to say.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
        self._model = model
        self._slots = _Slots()
        self._lengths: list[int] = [0] * FEWEST
        self._sizes: tuple[int, ...] = (FEWEST,)
        configs = (getattr(module, "config", None) for module in model.modules())
        self._configs = list({id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values())
        self._experts = [(model.get_submodule(one.name), one.call) for one in find_experts(model)]

    def like(self) -> SlotRows:
        """Empty rows of the same model."""
        return SlotRows(self._model)

    def read(self, tokens: Sequence[int]) -> Prefix:
        device = self._model.device
        reading = _Reading()
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
        hidden = run_backbone(self._model, ids, torch.arange(ids.shape[1], device=device)[None], reading)
        return Prefix(tuple(tokens), hidden[0], reading.kept)

    def place(self, row: int, prefix: Prefix) -> None:
        slots, length = self._slots, len(prefix.tokens)
        self._make_room(row + 1, length)
        for layer, pair in prefix.state.items():
            for tensors, new in zip((slots.keys, slots.values), pair, strict=True):
                arena = slots.arena(tensors, layer, new)
                arena[row, :, :length] = new[0]
                arena[row, :, length:] = 0  # what another text left there may be infinite
        self._lengths[row] = length

    def move(self, source: int, target: int) -> None:
        for tensors in (self._slots.keys, self._slots.values):
            for arena in tensors.values():
                arena[target] = arena[source]
        self._lengths[target] = self._lengths[source]

    def _make_room(self, rows: int, places: int) -> None:
        self._slots.make_room(rows, places)
        self._lengths += [0] * (self._slots.rows - len(self._lengths))

    def settle(self, most: int) -> None:
        self._make_room(most, 0)
        self._sizes = ()
        whole = self._answers(range(most), most)
        if not torch.equal(self._answers(range(most)[::-1], most).flip(0), whole):
            self._sizes = (1,)
            return
        sizes = []
        for size in _candidates(most):
            if torch.equal(self._answers(range(min(size, most)), size), whole[:size]):
                sizes.append(size)
        self._sizes = (*sizes, most)

    def _answers(self, tokens: Sequence[int], size: int) -> Tensor:
        """[rows, vocabulary], logits of texts of two tokens in products of so many rows."""
        embedding = self._model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        vocabulary = embedding.shape[0]
        trial = self.like()
        trial._sizes = (size,)
        for step in range(2):
            hidden = trial.advance([(7 + 31 * token + step) % vocabulary for token in tokens])
        return head_logits(self._model, padded(hidden, size))[: len(tokens)]

    def company(self, count: int) -> int:
        return next((size for size in self._sizes if size >= count), self._sizes[-1])

    def advance(self, tokens: Sequence[int]) -> Tensor:
        size = self.company(len(tokens))
        parts = [self._advance(start, tokens[start : start + size], size) for start in range(0, len(tokens), size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _advance(self, start: int, tokens: Sequence[int], size: int) -> Tensor:
        device, count, slots = self._model.device, len(tokens), self._slots
        self._make_room(start + size, 0)
        positions = self._lengths[start : start + count]
        self._make_room(start + size, max(positions) + 1)
        slots.first, slots.size, slots.length = start, size, rounded(max(positions) + 1)
        slots.positions = torch.tensor(positions, device=device)
        ids = torch.tensor([*tokens, *[0] * (size - count)], dtype=torch.int64, device=device)
        with ExitStack() as stack:
            stack.enter_context(_attention(self._configs, slots))
            for experts, call in self._experts:
                stack.enter_context(_one_by_one(experts, call, size))
            hidden = run_backbone(self._model, ids[:, None], padded(slots.positions, size)[:, None], slots)
        for row in range(start, start + count):
            self._lengths[row] += 1
        return hidden[:count, 0]


def padded(tensor: Tensor, rows: int) -> Tensor:
    """With zeros after the last row."""
    return (
        torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])]) if len(tensor) < rows else tensor
    )


def _candidates(most: int) -> list[int]:
    """Sizes below `most` that are worth a trial: 4, 8, 16, ..."""
    return [FEWEST << power for power in range(most.bit_length()) if FEWEST << power < most]


def rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


@contextmanager
def _attention(configs: Sequence[PreTrainedConfig], slots: _Slots) -> Iterator[None]:
    """The model's attention is "luthier_slots" within."""
    before = [config._attn_implementation for config in configs]
    token = _ACTIVE.set(slots)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        _ACTIVE.reset(token)


@contextmanager
def _one_by_one(experts: nn.Module, call: Call, size: int) -> Iterator[None]:
    """Tokens come to a module of experts one at a time within, so that no expert's products depend on who else asks."""
    own = experts.forward

    def routed(hidden: Tensor, *chosen: Tensor) -> Tensor:
        return torch.cat([own(*(tensor[row : row + 1] for tensor in (hidden, *chosen))) for row in range(len(hidden))])

    def sorted_(hidden: Tensor, counts: Any) -> Tensor:
        found, row = [], 0
        for expert, count in enumerate(counts):
            for _ in range(int(count)):
                found.append(own(hidden[row : row + 1], [int(other == expert) for other in range(len(counts))]))
                row += 1
        return torch.cat(found)

    def even(hidden: Tensor) -> Tensor:
        by_expert = hidden.view(-1, size, hidden.shape[-1])
        found = [own(by_expert[:, row]).view(len(by_expert), 1, -1) for row in range(size)]
        return torch.cat(found, 1).flatten(0, 1)

    had = experts.__dict__.get("forward")
    experts.__dict__["forward"] = {"routed": routed, "sorted": sorted_, "even": even}[call]
    try:
        yield
    finally:
        del experts.__dict__["forward"]
        if had is not None:
            experts.__dict__["forward"] = had


def run_backbone(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
    """The hidden states [rows, T, hidden] that a model's backbone makes.

    Args:
        model: of any architecture.
        ids: int64 [rows, T].
        positions: int64 [rows, T]; not given to a backbone that takes none.
        cache: where keys and values go; None for a run that keeps none.
    """
    backbone = getattr(model, backbone_name(model))
    names = taken(type(backbone).forward)
    arguments: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        arguments["cache" if "cache" in names else "past_key_values"] = cache
    if "position_ids" in names:
        arguments["position_ids"] = positions
    return cast(Tensor, backbone(input_ids=ids, **arguments)[0])


@functools.cache
def taken(forward: Any) -> frozenset[str]:
    """Names of the arguments of a backbone's forward."""
    return frozenset(inspect.signature(forward).parameters)
