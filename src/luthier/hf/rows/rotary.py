"""Rotary frequencies that depend on how long a text is ("longrope", "dynamic"), for each document of a packed row.

Transformers takes the longest position that it is given for the length. In a packed row that would be another
document's, and in a part of a row, which is all that a rank may hold, perhaps not even its own document's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from luthier.hf.rows.documents import Documents, active_documents


def follow_documents(model: nn.Module) -> None:
    """Let rotary embeddings whose frequencies depend on length compute those of each document by its own, in place."""
    for module in model.modules():
        if _by_length(module):
            module.forward = partial(_by_document, module)


def depends_on_length(model: nn.Module) -> bool:
    """Whether what a model makes of a position depends on how long its document is."""
    return any(_by_length(module) for module in model.modules())


def _by_length(module: nn.Module) -> bool:
    kind = str(getattr(module, "rope_type", ""))
    return "longrope" in kind or "dynamic" in kind


def _by_document(module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, once for each document.

    Args:
        module: gives cosines and sines [1, T, width] at positions.
        x: tells device and dtype.
        position_ids: int64 [..., T].
    """
    own = type(module).forward
    row = active_documents()
    if row is None or (len(row.spans) == 1 and row.exchange is None):
        return own(module, x, position_ids, *args, **kwargs)
    index = _held(row, position_ids.device)
    found: list[tuple[torch.Tensor, Any]] = []
    for number, (start, stop) in enumerate(row.spans):
        where = (index == number).nonzero().squeeze(-1)
        positions = position_ids[..., where]
        last = positions.new_full((*positions.shape[:-1], 1), stop - start - 1)  # so that the length is the document's
        found.append((where, own(module, x, torch.cat([positions, last], -1), *args, **kwargs)))
    order = torch.cat([where for where, _ in found]).argsort()
    first = found[0][1]
    if isinstance(first, torch.Tensor):
        return torch.cat([value[:, :-1] for _, value in found], 1)[:, order]
    values = zip(*(value for _, value in found), strict=True)
    return tuple(torch.cat([value[:, :-1] for value in pieces], 1)[:, order] for pieces in values)


def _held(row: Documents, device: torch.device) -> torch.Tensor:
    """int64: the document that each position here belongs to."""
    index = row.index(device)
    if row.exchange is None:
        return index
    return index[row.exchange.positions(row.tokens).to(device)]
