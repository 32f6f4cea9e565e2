"""The bits of bf16: a weight and the 16 bits that it lacks, and rounding that is right on average.

A float32 and a bfloat16 have the same sign and exponent; a bfloat16 is the upper half of the bits. So a bf16 weight and
an int16 remainder are together one exact float32, and adding a uniform 16-bit number to the float32 bits before cutting
the lower half off rounds up with just the probability that makes the expectation exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 1 << 15


def join(values: Tensor, remainders: Tensor) -> Tensor:
    """Complete bf16 values to the float32 ones that they were split from.

    Args:
        values: float32 [n] that hold bf16 values, overwritten.
        remainders: int16 [n], as `split` made them; zeros leave the values as they are.

    >>> before = torch.tensor([0.1, -2.7, 3e-39])
    >>> weights, remainders = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    >>> split(before.clone(), weights, remainders)
    >>> bool(torch.equal(join(weights.float(), remainders), before))
    True
    """
    values.view(torch.int32).add_(remainders)
    return values


def split(values: Tensor, weights: Tensor, remainders: Tensor) -> None:
    """Round to the nearest bf16 (ties away from zero) and keep what that lost.

    Args:
        values: float32 [n], destroyed.
        weights: bf16 [n], overwritten.
        remainders: int16 [n], overwritten: the float32 bits minus those of the bf16 value, -32768 to 32767.
    """
    keep = _not_finite(values)
    bits = values.view(torch.int32).add_(_HALF)
    remainders.copy_(bits)  # the lower 16 bits
    remainders.bitwise_xor_(-_HALF)
    weights.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    if keep is not None:
        mask, originals = keep
        weights.masked_scatter_(mask, originals)
        remainders.masked_fill_(mask, 0)


def stochastic_round(values: Tensor, weights: Tensor, generator: torch.Generator) -> None:
    """Round each value to one of its two bf16 neighbours, to the nearer one more often: E[rounded] = value.

    NaN and infinity stay what they are: noise on their bits would make numbers of them.

    Args:
        values: float32 [n], destroyed.
        weights: bf16 [n], overwritten.
        generator: where the 16 random bits a value come from; on the same device.

    >>> rounded = torch.empty(4, dtype=torch.bfloat16)
    >>> stochastic_round(torch.tensor([1.0, 0.0, float("inf"), float("nan")]), rounded, torch.Generator())
    >>> rounded.tolist()
    [1.0, 0.0, inf, nan]
    """
    keep = _not_finite(values)
    count = values.numel()
    # 64 random bits a draw: four numbers, uniform in -32768 to 32767.
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device=values.device)
    noise = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]
    bits = values.view(torch.int32).add_(noise).add_(_HALF)
    weights.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    if keep is not None:
        mask, originals = keep
        weights.masked_scatter_(mask, originals)


def _not_finite(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where `values` are NaN or infinite, and those of them as bf16; None if nowhere."""
    if values.numel() == 0:
        return None
    # One pass on the CPU, where isfinite takes ten times as long. NaN propagates through both.
    extremes = torch.stack(torch.aminmax(values))
    if values.device.type == "cpu" and bool(torch.isfinite(extremes).all()):
        return None
    mask = ~torch.isfinite(values)
    return mask, values[mask].bfloat16()
