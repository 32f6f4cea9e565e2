"""Which way the texts of an architecture can grow, found out on a small model of its kind.

In this order: rows of one cache by a loop over layers of the usual form (`lean.LeanRows`); rows of one cache by the
model's own modules (`slots.SlotRows`); each text alone with the cache that the model makes itself
(`AloneRows`: state spaces, linear attention); each text alone, all of it run again for every token (`WholeRows`, which
is right whatever the model keeps). A way is taken if it gives the small model's own full forward for texts of several
lengths, longer than its windows, that join, move and leave; and if a text alone gets the very bits that it gets in
company.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luthier.batch import Batch, Sample
from luthier.errors import ModelError, first_line
from luthier.hf.anatomy import backbone_name
from luthier.hf.debug.small import Kind, kind_of, make_small
from luthier.hf.decoding.lean import LeanRows
from luthier.hf.decoding.slots import Prefix, Rows, SlotRows, run_backbone, taken
from luthier.hf.forward import hidden_states
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.rows.attention import takes_attention
from luthier.hf.rows.virtual import virtual_of

_log = logging.getLogger(__name__)


@dataclass
class _Text:
    """A row of its own: its ids, and the cache it goes on from."""

    tokens: list[int]
    cache: Any = None


class _Texts:
    """What `Rows` have in common of which each is a text of its own.

    Args:
        model: a causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._rows: dict[int, _Text] = {}
        self._most = 1

    def settle(self, most: int) -> None:
        self._most = most

    def company(self, count: int) -> int:
        return self._most

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows.pop(source)


class WholeRows(_Texts):
    """`Rows` of which each is run again, all of it, for every token.

    Args:
        model: any causal language model.
    """

    def read(self, tokens: Sequence[int]) -> Prefix:
        return Prefix(tuple(tokens), self._run(tokens), None)

    def place(self, row: int, prefix: Prefix) -> None:
        self._rows[row] = _Text(list(prefix.tokens))

    def advance(self, tokens: Sequence[int]) -> Tensor:
        found = []
        for row, token in enumerate(tokens):
            self._rows[row].tokens.append(token)
            found.append(self._run(self._rows[row].tokens)[-1])
        return torch.stack(found)

    def _run(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self._model.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return run_backbone(self._model, ids, positions, None)[0]


class VirtualRows(WholeRows):
    """`WholeRows` of a model that has something before its texts, or beside their attention.

    Args:
        model: any causal language model.
    """

    def _run(self, tokens: Sequence[int]) -> Tensor:
        sample = Sample.from_ids([*tokens, 0], [0.0] * (len(tokens) + 1))
        return hidden_states(self._model, Batch.pack([sample]).to(self._model.device))


class AloneRows(_Texts):
    """`Rows` of which each has a cache of the model's own making.

    Args:
        model: a causal language model whose backbone gives back its cache.
    """

    def read(self, tokens: Sequence[int]) -> Prefix:
        hidden, cache = self._run(tokens, 0, {})
        return Prefix(tuple(tokens), hidden, cache)

    def place(self, row: int, prefix: Prefix) -> None:
        self._rows[row] = _Text(list(prefix.tokens), copy.deepcopy(prefix.state))

    def advance(self, tokens: Sequence[int]) -> Tensor:
        found = []
        for row, token in enumerate(tokens):
            text = self._rows[row]
            hidden, text.cache = self._run([token], len(text.tokens), text.cache)
            text.tokens.append(token)
            found.append(hidden[-1])
        return torch.stack(found)

    def _run(self, tokens: Sequence[int], start: int, cache: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [T, hidden] of tokens from a place on, and what the model kept, by the name it takes it by."""
        model = self._model
        backbone = getattr(model, backbone_name(model))
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=model.device)
        arguments = dict(cache)
        if "position_ids" in taken(type(backbone).forward):
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        output = backbone(input_ids=ids, use_cache=True, **arguments)
        name = next((name for name in _KEPT if output.get(name) is not None), None)
        if name is None:
            raise ModelError("the model keeps nothing between tokens", where="sampling")
        return output[0][0], {name: output[name]}


_KEPT = ("cache", "past_key_values", "cache_params", "state")


def rows_of(model: PreTrainedModel) -> Rows:
    """The fastest way for this model's texts to grow that is right.

    Args:
        model: loaded, adapters in place or not.
    """
    if virtual_of(model) is not None:
        return VirtualRows(model)
    way = way_of(model)
    try:
        return _WAYS[way](model)
    except ModelError:  # its layers differ from one another, as pruning leaves them
        return _WAYS["slots" if takes_attention(type(model)) else "whole"](model)


def way_of(model: PreTrainedModel) -> str:
    """Which way that is: "lean", "slots", "alone" or "whole"."""
    if any(follows_length(module) for module in model.modules()):
        return "whole"  # what a cache holds was rotated for a text that was shorter
    return _way_of(kind_of(model), model.dtype == torch.float32 and model.device.type == "cpu")


def follows_length(module: torch.nn.Module) -> bool:
    """Whether a module's rotary frequencies are others once a text is longer."""
    kind = str(getattr(module, "rope_type", ""))
    return "longrope" in kind or "dynamic" in kind


_WAYS: dict[str, Callable[[PreTrainedModel], Rows]] = {
    "lean": LeanRows,
    "slots": SlotRows,
    "alone": AloneRows,
    "whole": WholeRows,
}
_LENGTHS = (3, 37, 19)
"""Of the texts of a trial: shorter and longer than the windows of 16 places that small models have."""
_STEPS = 6
_TOLERANCE = 1e-3


@functools.cache
@torch.no_grad()
def _way_of(kind: Kind, compiled: bool) -> str:
    try:
        small = make_small(kind)
    except ModelError as error:
        _log.info("%s: %s; every token runs its whole text again", kind.cls.__name__, error.what)
        return "whole"
    for name in ("lean", "slots", "alone"):
        if name == "slots" and not takes_attention(kind.cls):
            continue
        try:
            way = functools.partial(LeanRows, compiled=compiled) if name == "lean" else _WAYS[name]
            fault = _fault(small, way)
        except RAISED_BY_MODELS as error:  # it cannot be called so
            fault = first_line(error)
        if not fault:
            return name
        _log.info("%s cannot be sampled from by way of %r: %s", kind.cls.__name__, name, fault)
    return "whole"


def _fault(model: Any, make: Callable[[PreTrainedModel], Rows]) -> str:
    """What is wrong with a way for a small model; "" if nothing."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    texts = [torch.randint(2, vocabulary, (length + 2 * _STEPS,), generator=generator).tolist() for length in _LENGTHS]
    expected = [WholeRows(model).read(text).hidden for text in texts]
    together = make(model)
    seen: list[list[Tensor]] = [[] for _ in texts]
    order: list[int] = []

    def join(number: int) -> None:
        prefix = together.read(texts[number][: _LENGTHS[number]])
        seen[number].extend(prefix.hidden)
        together.place(len(order), prefix)
        order.append(number)

    def grow() -> None:
        for _ in range(_STEPS):
            hidden = together.advance([texts[number][len(seen[number])] for number in order])
            for number, one in zip(order, hidden, strict=True):
                seen[number].append(one)

    join(0)
    join(1)
    grow()
    join(2)
    together.move(2, 0)  # the first leaves, the last takes its place
    order[:] = [2, 1]
    grow()
    for number, (hidden, right) in enumerate(zip(seen, expected, strict=True)):
        given = torch.stack(hidden)
        difference = float((given - right[: len(given)]).abs().max() / right.abs().max())
        if not difference <= _TOLERANCE:
            return f"its hidden states differ by {difference:.1e} from those of a whole text of {_LENGTHS[number]}"
    alone = make(model)
    prefix = alone.read(texts[1][: _LENGTHS[1]])
    alone.place(0, prefix)
    for token, before in zip(texts[1][_LENGTHS[1] :], seen[1][_LENGTHS[1] :], strict=True):
        if not torch.equal(alone.advance([token])[0], before):
            return "what one text gets depends on the others"
    return ""
