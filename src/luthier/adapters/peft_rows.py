"""Rows of single tokens in PEFT's files: `trainable_token_indices`, and what lies under `token_adapter`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from luthier.adapters.rows import CHILD, SUFFIX, NewTokens, TokenRows, rows_of
from luthier.errors import ConfigError
from luthier.hf.anatomy import describe


def tokens_in_file(config: Any, model: Any) -> NewTokens | None:
    """Whose rows PEFT's files hold; None where they hold none.

    Args:
        config: `trainable_token_indices` of `adapter_config.json`: ids, or ids by the name of a module.
        model: for the names of table and head.

    Raises:
        ConfigError: table and head have rows of different tokens.
    """
    if not config:
        return None
    listed = list(config.values()) if isinstance(config, dict) else [config]
    anatomy = describe(model)
    if any(sorted(ids) != sorted(listed[0]) for ids in listed):
        raise ConfigError("table and head have rows of different tokens", where="trainable_token_indices")
    own = isinstance(config, dict) and any(f"{anatomy.head}".endswith(name) for name in config)
    return NewTokens(tuple(sorted(int(token) for token in listed[0])), head=anatomy.tied or own)


def in_order(config: Any, weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Weights of PEFT's file with rows by ascending id, and without what PEFT wrote of a table that has grown.

    Args:
        config: as of `tokens_in_file`.
        weights: name -> tensor, PEFT's prefix taken off.
        model: rows attached.
    """
    if not config:
        return weights
    found: dict[str, Tensor] = {}
    for key, value in weights.items():
        name = key.replace(f".{CHILD}.base_layer.", ".")
        if name.endswith(SUFFIX):
            module = name.removesuffix(SUFFIX)
            ids = config if not isinstance(config, dict) else next(v for k, v in config.items() if module.endswith(k))
            value = value[torch.tensor(ids).argsort()]
        elif name.endswith(".weight") and isinstance(own := _rows_at(model, name.removesuffix(".weight")), TokenRows):
            value = value[: own.base] if len(value) == own.base + own.extra else value
        found[name] = value
    return found


def _rows_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)._modules.get(CHILD)
    except AttributeError:
        return None


def ids_for_peft(model: Any) -> list[int] | dict[str, list[int]] | None:
    """`trainable_token_indices` as PEFT takes it: one list where the head is tied, else one for each module's name."""
    found = rows_of(model)
    if not found:
        return None
    if len(found) == 1:
        return list(next(iter(found.values())).ids)
    return {name.rpartition(".")[2]: list(own.ids) for name, own in found.items()}
