"""Weights that lie in a checkpoint joined with others, or in pieces, and what that means for reading them by slices.

Transformers' loader cuts what it reads by the shard of the weight it is for, and converts afterwards. Along the very
dimension in which weights are joined that gives other numbers than cutting after the conversion, without a word.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    WeightConverter,
)

_JOINING = (Chunk, Concatenate, Interleave, PermuteForRope, Split)


def joined_dims(model: PreTrainedModel) -> dict[nn.Parameter, frozenset[int]]:
    """Which weights must not be cut along which dimensions while they are read.

    Args:
        model: of the architecture; on meta or not.

    Returns:
        parameter -> dimensions; weights that lie in a checkpoint as they are, are left out.
    """
    return _dims(model, _JOINING)


def stacked_dims(model: PreTrainedModel) -> dict[nn.Parameter, frozenset[int]]:
    """Which weights lie in checkpoints in slices, a tensor for each (experts), and along which dimensions.

    A rank that holds no slice would read nothing, which the loader cannot make a weight of.

    Args:
        model: as of `joined_dims`.
    """
    return _dims(model, (MergeModulelist,))


def _dims(model: PreTrainedModel, steps: tuple[type[ConversionOps], ...]) -> dict[nn.Parameter, frozenset[int]]:
    """Parameter -> the dimensions along which conversions of these kinds make it."""
    named = dict(model.named_parameters())
    found: dict[nn.Parameter, frozenset[int]] = {}
    for entry in get_model_conversion_mapping(model):
        if not isinstance(entry, WeightConverter):
            continue
        dims = frozenset(getattr(step, "dim", 0) for step in entry.operations if isinstance(step, steps))
        patterns = [re.compile(re.escape(target).replace(r"\*", r"\d+")) for target in entry.target_patterns]
        for name, parameter in named.items():
            if dims and any(pattern.search(name) for pattern in patterns):
                found[parameter] = found.get(parameter, frozenset()) | dims
    return found
