"""What counts as a linear layer: torch's own, and the transposed one of GPT-2 and its kin."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The sizes of a linear layer, y = x W^T + b.

    Attributes:
        inputs: length of x.
        outputs: length of y.
        transposed: the weight lies as [inputs, outputs] instead of [outputs, inputs].
        plain: the layer's forward is torch's or Transformers' own, so that its product may be computed elsewhere.
    """

    inputs: int
    outputs: int
    transposed: bool
    plain: bool


def linear_shape(module: nn.Module) -> LinearShape | None:
    """The sizes of a linear layer, or None for any other module."""
    if isinstance(module, nn.Linear):
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        return LinearShape(module.in_features, module.out_features, transposed=False, plain=plain)
    if isinstance(module, Conv1D):
        plain = type(module).forward is Conv1D.forward and "forward" not in vars(module)
        return LinearShape(module.nx, module.nf, transposed=True, plain=plain)
    return None
