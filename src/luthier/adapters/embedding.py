"""LoRA beside the table of tokens: the row of a token moves by s B a, a the token's column of A.

The table changes its class in place, as a linear layer does; its weight [tokens, width] is the transposed one of a
linear layer that is given a one at the token's place, so A is [rank, tokens] and B [width, rank], as PEFT has them.
Where the table multiplies its rows (Gemma), it multiplies what is added as well.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luthier.adapters.dora import Magnitude, layer_factor
from luthier.adapters.layer import AdapterMatrix, LoraSpec
from luthier.errors import ConfigError
from luthier.hf.linear import LinearShape


class LoraEmbedding(nn.Module):
    """What a table of tokens becomes in addition to itself; always the first base of a class that `attach` makes.

    Attributes:
        lora_A: `weight` [rank, tokens].
        lora_B: `weight` [width, rank].
        lora_magnitude_vector: `weight` [width]; of DoRA alone.
        lora_spec: rank, alpha; dropout is for linear layers.
        lora_shape: the sizes of the base, as of a transposed linear layer.
    """

    weight: nn.Parameter
    bias: None
    padding_idx: int | None
    lora_A: AdapterMatrix
    lora_B: AdapterMatrix
    lora_magnitude_vector: Magnitude
    lora_spec: LoraSpec
    lora_shape: LinearShape

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> their rows [..., width]."""
        y = cast(Tensor, super().forward(input))
        low = F.embedding(input, self.lora_A.weight.t(), self.padding_idx)
        more = F.linear(low, self.lora_B.weight) * self.lora_spec.scale
        if (factor := embedding_scale(self)) is not None:
            more = more * factor
        if not self.lora_spec.dora:
            return (y + more).to(y.dtype)
        return ((y + more) * layer_factor(cast(Any, self))).to(y.dtype)


def embedding_scale(table: nn.Module) -> Any:
    """By what a table multiplies its rows; None where it does not."""
    found: Any = getattr(table, "embed_scale", None)
    return found.to(cast(Tensor, table.weight).dtype) if isinstance(found, Tensor) else found


_CLASSES: dict[type, type[nn.Module]] = {}
"""Class of the base -> class of the adapted table."""


def attach_embedding(table: nn.Module, name: str, spec: LoraSpec, dtype: torch.dtype | None = None) -> None:
    """Adapt a table of tokens in place; the matrices are left uninitialised.

    Args:
        table: on meta or real, not adapted yet.
        name: full name, for messages.
        spec: rank, alpha.
        dtype: of the two matrices; the table's when left out.

    Raises:
        ConfigError: the table does more than look rows up and multiply them.
    """
    plain = type(table).forward is nn.Embedding.forward or getattr(table, "embed_scale", None) is not None
    if not (plain and isinstance(table, nn.Embedding) and table.max_norm is None):
        what = f"{name} is a {type(table).__name__}, beside whose rows nothing can be added"
        raise ConfigError(what, where="adapter.target", remedy="leave the embedding out")
    where: dict[str, Any] = {"device": table.weight.device, "dtype": dtype or table.weight.dtype}
    tokens, width = table.num_embeddings, table.embedding_dim
    down, up = AdapterMatrix(tokens, spec.rank, **where), AdapterMatrix(spec.rank, width, **where)
    base = cast("type[nn.Module]", type(table))
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Lora{base.__name__}", (LoraEmbedding, base), {"__module__": __name__})
    layer = cast(LoraEmbedding, table)
    layer.__class__ = cast(Any, _CLASSES[base])
    layer.lora_A, layer.lora_B = down, up
    if spec.dora:
        layer.lora_magnitude_vector = Magnitude(width, device=table.weight.device, dtype=table.weight.dtype)
    layer.lora_spec, layer.lora_shape, layer.bias = spec, LinearShape(tokens, width, transposed=True, plain=True), None
    layer.train(layer.training)


def detach_embedding(layer: LoraEmbedding) -> None:
    """Remove the adapter and put the class back; the table is left as it is."""
    for name in ("lora_A", "lora_B", *(["lora_magnitude_vector"] if layer.lora_spec.dora else [])):
        delattr(layer, name)
    for name in ("lora_spec", "lora_shape", "bias"):
        delattr(layer, name)
    layer.__class__ = type(layer).__mro__[2]
