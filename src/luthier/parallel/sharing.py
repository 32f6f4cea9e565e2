"""A row that is shared: how a model is told, and the proof, on a small one of its kind, that it can be.

A model may share its rows where positions meet in attention alone, and where each knows its place from `position_ids`
alone. To try it, one process gives the small model the positions of a row in disorder, with an exchange that brings
them into order for attention, as ranks do with their parts: hidden states must be those of the row in order. So no
architecture is named here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from luthier.batch import Batch, Sample
from luthier.errors import UserError
from luthier.hf.anatomy import backbone_name
from luthier.hf.attention import register_attention
from luthier.hf.documents import Exchange, active_documents, documents
from luthier.hf.forward import hidden_states, packing_is_exact
from luthier.hf.quiet import quiet
from luthier.hf.shrink import shrink

_LENGTHS = (5, 23, 4)
_TOLERANCE = 1e-4
"""Of the largest entry, in fp32. What is out of place is off by far more."""


def share(model: Any, exchange: Exchange) -> list[Any]:
    """Make a model run on parts of rows, in place.

    Args:
        model: a Transformers model, on meta or loaded.
        exchange: between the ranks that share each row.

    Returns:
        handles whose `remove()` undoes it.
    """
    hooks = _Rows(exchange)
    backbone = getattr(model, backbone_name(model))
    return [
        backbone.register_forward_pre_hook(hooks.enter, with_kwargs=True),
        backbone.register_forward_hook(hooks.leave, with_kwargs=True, always_call=True),
    ]


class _Rows:
    """Hooks of a backbone that tell attention, for one forward pass, that a row is shared."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open: list[Any] = []

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = next(v for v in (options.get("input_ids"), options.get("inputs_embeds"), *arguments) if v is not None)
        row = active_documents()
        shared = row is not None and given.shape[1] * self._exchange.degree == row.tokens
        context = documents(replace(row, exchange=self._exchange) if row is not None and shared else row)
        context.__enter__()
        self._open.append(context)
        if shared:
            # Without a mask Transformers would look for documents in this part of the row and cut them at its ends.
            ones = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
            options = {**options, "attention_mask": ones}
        return arguments, options

    def leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def fault(model: Any) -> str | None:
    """Why rows of a model cannot be shared, as a clause; None where they can.

    Args:
        model: whole, perhaps on meta; one that looks its attention up by name.
    """
    kind: Any = type(model)
    kind = getattr(sys.modules[kind.__module__], kind.__name__, kind)  # of a class that loading derives, the base
    config: Any = type(model.config)
    return _tried(kind, config, model.config.to_json_string())


@lru_cache(maxsize=8)
def _tried(cls: type[Any], config_class: type[Any], text: str) -> str | None:
    with torch.random.fork_rng(devices=[]), quiet(), torch.no_grad():
        torch.manual_seed(0)
        try:
            small = cls(shrink(config_class.from_dict(json.loads(text)))).float().eval()
            small.set_attn_implementation(register_attention())
        except Exception as error:
            return f"no small model of its kind can be made to try it on ({_said(error)})"
        for parameter in small.parameters():  # so large that what is out of place shows
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        packed, why = packing_is_exact(small)
        return _try(small) if packed else f"{why}, and a row is padded by a document"


def _try(model: Any) -> str | None:
    """Run a row in order and in disorder."""
    random = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    samples = [Sample.from_ids(random.integers(2, vocabulary, n + 1), np.ones(n + 1)) for n in _LENGTHS]
    row = Batch.pack(samples)
    order = torch.from_numpy(random.permutation(row.tokens))
    expected = hidden_states(model, row)
    handles = share(model, _Disorder(order))
    try:
        mixed = replace(row, input_ids=row.input_ids[:, order], position_ids=row.position_ids[:, order])
        found = hidden_states(model, mixed)
    except Exception as error:
        return f"its forward refuses a part of a row ({_said(error)})"
    finally:
        for handle in handles:
            handle.remove()
    off = float((found - expected[order]).abs().max() / expected.abs().max())
    if not off <= _TOLERANCE:
        return "its positions meet, or find their places, in other ways than attention and position_ids"
    return None


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


def _said(error: Exception) -> str:
    if isinstance(error, UserError):
        return error.what
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
