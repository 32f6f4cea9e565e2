"""Bytes that training takes: exact where they follow from shapes, an estimate for activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.linear import linear_shape

# Positions that the head takes at once, with the columns of the vocabulary that are there at once (losses/).
_HEAD_ROWS, _HEAD_COLUMNS = 1024, 2048


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for.

    Attributes:
        weights: of the whole model, buffers and adapters included, tied ones once.
        gradients: of what trains, fp32 for bf16 weights.
        optimizer: moments, and the low bits of bf16 weights.
        activations: kept from the forward for the backward pass of one microbatch; an estimate.
        logits: of the head at work: one tile of scores, the hidden states' gradient, and with a head that trains the
            scores of one chunk.
        total: of all these.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def count_memory(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: int,
    *,
    checkpointing: Literal["off", "full", "selective"] = "off",
) -> Memory:
    """Count the bytes of one step.

    Args:
        model: on meta or not, adapters in place, in the dtypes that it trains in, ties aliased.
        optimizer: built for it.
        tokens: positions of the largest microbatch.
        checkpointing: which layers' activations are computed again instead of kept.
    """
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = [*parameters, *model.buffers()]
    states = [value for values in optimizer.state.values() for value in values.values()]
    return Memory(
        weights=sum(_bytes(tensor) for tensor in tensors),
        gradients=sum(p.numel() * torch.promote_types(p.dtype, torch.float32).itemsize for p in trained),
        optimizer=sum(_bytes(state) for state in states if isinstance(state, torch.Tensor)),
        activations=_activations(model, tokens, checkpointing),
        logits=_logits(model, tokens),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _activations(model: Any, tokens: int, checkpointing: str) -> int:
    """What layers keep: their residual stream, the inputs of norms and products, queries, keys, values, gates.

    A layer keeps its input twice (residual and normalised) for each of its two halves, the outputs of the products that
    go into attention and into the gate, and the inputs of those that come out.
    """
    anatomy = describe(model)
    width = model.get_input_embeddings().weight.shape[-1]
    size = model.dtype.itemsize
    kept = []
    for layer in anatomy.layers:
        elements = 4 * width
        for names in (_inside(anatomy.attn, layer), _inside(anatomy.mlp, layer)):
            shapes = [shape for name in names if (shape := linear_shape(model.get_submodule(name))) is not None]
            if shapes:
                elements += sum(shape.outputs for shape in shapes[:-1]) + shapes[-1].inputs
        elements += _experts(model, anatomy, layer)
        kept.append(elements)
    match checkpointing:
        case "full":  # inputs of all layers, and one layer at a time in full
            elements = width * len(kept) + max(kept, default=0)
        case "selective":
            elements = sum(kept[1::2]) + width * len(kept[::2]) + max(kept, default=0)
        case _:
            elements = sum(kept)
    return (elements + 2 * width) * size * tokens


def _experts(model: Any, anatomy: Anatomy, layer: str) -> int:
    """Elements a token that visited experts keep: the gate, the other half and their product."""
    config = model.config.get_text_config()
    visited = getattr(config, "num_experts_per_tok", None) or 1
    elements = 0
    for name in _inside(anatomy.experts, layer):
        inner = [min(p.shape[1:]) for p in model.get_submodule(name).parameters(recurse=False) if p.dim() == 3]
        elements += 3 * visited * max(inner, default=0)
    return elements


def _logits(model: Any, tokens: int) -> int:
    head = model.get_output_embeddings()
    if head is None:
        return 0
    vocabulary, width = head.weight.shape
    rows = min(tokens, _HEAD_ROWS)
    scores = rows * (vocabulary if head.weight.requires_grad else min(vocabulary, _HEAD_COLUMNS))
    return scores * model.dtype.itemsize + rows * width * 4 + tokens * width * model.dtype.itemsize


def _inside(names: tuple[str, ...], layer: str) -> list[str]:
    return [name for name in names if name.startswith(f"{layer}.")]
