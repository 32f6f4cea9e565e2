"""Projections that make queries, keys and values by one matrix, and which of its outputs are which.

There are two orders. GPT-2, MPT and DBRX lay all queries, then all keys, then all values. GPT-NeoX, Falcon, BLOOM and
GPT-BigCode lay, for each key head, the queries that share it, then the key, then the value; with one key head for all
the two orders are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from luthier.hf.anatomy import describe
from luthier.hf.linear import linear_shape

_FUSED = ("query_key_value", "c_attn", "Wqkv")
_OUTPUT = ("dense", "c_proj", "out_proj")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def fused_projections(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The fused projections whose order is known.

    Args:
        model: on meta or real, adapters in place or not.

    Returns:
        full name of the linear layer -> int64 [outputs], 0 where an output is of a query, 1 of a key, 2 of a value.
    """
    found: dict[str, torch.Tensor] = {}
    for name in describe(model).all_linear:
        parent_name, _, key = name.rpartition(".")
        if key in _FUSED and (parts := _parts(model.get_submodule(parent_name), key)) is not None:
            found[name] = parts
    return found


def _parts(module: Any, key: str) -> torch.Tensor | None:
    shape = linear_shape(module.get_submodule(key))
    output = next((linear_shape(child) for name, child in module.named_children() if name in _OUTPUT), None)
    places = (module, getattr(module, "config", None))
    heads = next((value for at in places for name in _HEADS if isinstance(value := getattr(at, name, None), int)), None)
    if shape is None or output is None or heads is None or output.inputs % heads:
        return None
    size, queries = output.inputs // heads, output.inputs
    keys, odd = divmod(shape.outputs - queries, 2)  # outputs of the keys, as many as of the values
    if odd or keys <= 0 or keys % size or heads % (keys // size):
        return None
    if key == "Wqkv" or (key == "c_attn" and shape.transposed):
        groups, within = 1, (queries, keys, keys)
    else:
        groups = keys // size
        within = (queries // groups, size, size)
    return torch.repeat_interleave(torch.arange(3), torch.tensor(within)).repeat(groups)
