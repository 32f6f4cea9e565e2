"""Weights that lie in a checkpoint joined with others, or in pieces, and what that means for reading them by slices.

Transformers' loader cuts what it reads by the shard of the weight it is for, and converts afterwards. Along the very
dimension in which weights are joined that gives other numbers than cutting after the conversion, without a word.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Interleave, PermuteForRope, Split, WeightConverter

from luthier.errors import ConfigError

_JOINING = (Chunk, Concatenate, Interleave, PermuteForRope, Split)


def joined_dims(model: PreTrainedModel) -> dict[nn.Parameter, frozenset[int]]:
    """Which weights must not be cut along which dimensions while they are read.

    Args:
        model: of the architecture; on meta or not.

    Returns:
        parameter -> dimensions; weights that lie in a checkpoint as they are, are left out.
    """
    named = dict(model.named_parameters())
    found: dict[nn.Parameter, frozenset[int]] = {}
    for entry in get_model_conversion_mapping(model):
        if not isinstance(entry, WeightConverter):
            continue
        dims = frozenset(getattr(step, "dim", 0) for step in entry.operations if isinstance(step, _JOINING))
        patterns = [re.compile(re.escape(target).replace(r"\*", r"\d+")) for target in entry.target_patterns]
        for name, parameter in named.items():
            if dims and any(pattern.search(name) for pattern in patterns):
                found[parameter] = found.get(parameter, frozenset()) | dims
    return found


def refuse_cut_joints(model: PreTrainedModel) -> None:
    """Refuse a layout that cuts weights where a checkpoint joins them.

    Raises:
        ConfigError: it would read wrong numbers.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, dims in joined_dims(model).items():
        cut = parameter.placements if isinstance(parameter, DTensor) else ()
        if any(isinstance(how, Shard) and how.dim % parameter.ndim in dims for how in cut):
            raise ConfigError(
                f"{names[parameter]} lies joined with others in checkpoints of its kind, along the "
                "dimension that this layout cuts",
                where="parallel.tp",
                remedy="set it to 1, and dp_shard higher",
            )
