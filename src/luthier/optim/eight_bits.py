"""Moments in eight bits: blocks of 256 numbers, each with its largest as scale and steps that lie closer near zero.

Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, by the kernels
of bitsandbytes, on the CPU and on CUDA. Small tensors keep their moments in fp32, as there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from luthier.errors import UserError

BLOCK = 256
SMALLEST = 4096
"""Tensors of fewer numbers keep their moments in fp32."""
SCALE = "_scale"
"""What the name of the state that holds a moment's scales ends in."""


def eight_bit_states(parameter: Tensor, name: str, state: str) -> dict[str, Tensor]:
    """A moment of zeros, and its scales.

    Args:
        parameter: whose moment; plain, of at least `SMALLEST` numbers.
        name: of the parameter, for messages.
        state: of the moment.

    Returns:
        `state`: uint8 in the parameter's shape; `state` + `SCALE`: fp32, one for each block.

    Raises:
        UserError: bitsandbytes is not installed, or the parameter is sharded: blocks would be others on each layout.
    """
    functional()
    if hasattr(parameter, "to_local"):
        raise refused(name)
    zero = int((_code(state, "cpu") == 0).nonzero()[0])
    blocks = -(-parameter.numel() // BLOCK)
    return {
        state: torch.full(parameter.shape, zero, dtype=torch.uint8, device=parameter.device),
        state + SCALE: torch.zeros(blocks, dtype=torch.float32, device=parameter.device),
    }


def has_eight_bits(parameter: Tensor, state_dtype: str) -> bool:
    """Whether moments of a parameter are kept so, where `state_dtype` is asked for."""
    return state_dtype == "int8" and parameter.numel() >= SMALLEST and parameter.dtype != torch.float64


def refused(name: str) -> UserError:
    """What is said of a parameter that is sharded."""
    return UserError(
        f"8-bit moments have blocks that other layouts do not, and {name} is sharded",
        where="optimizer.state_dtype",
        remedy="use fp32 or bf16, or one process",
    )


def widened(values: Tensor, scales: Tensor, state: str) -> Tensor:
    """fp32 numbers of a moment, in its shape."""
    code = _code(state, str(values.device))
    flat = functional().dequantize_blockwise(values.reshape(-1), absmax=scales, code=code, blocksize=BLOCK)
    result: Tensor = flat.view(values.shape)
    return result


def narrowed(wide: Tensor, values: Tensor, scales: Tensor, state: str) -> None:
    """Put fp32 numbers into a moment, each rounded to the nearest step of its block."""
    code = _code(state, str(values.device))
    quantised, how = functional().quantize_blockwise(wide.reshape(-1), code=code, blocksize=BLOCK)
    values.view(-1).copy_(quantised.view(-1))
    scales.copy_(how.absmax)


@cache
def functional() -> Any:
    """bitsandbytes' functions.

    Raises:
        UserError: it is not installed.
    """
    try:
        from bitsandbytes import functional as found
    except ImportError as error:
        raise UserError(
            "8-bit moments need bitsandbytes, which is not installed",
            where="optimizer.state_dtype",
            remedy="pip install 'luthier[qlora]'",
        ) from error
    return found


@cache
def _code(state: str, device: str) -> Tensor:
    """The 256 steps between -1 and 1, or between 0 and 1 for the second moment, which is never negative."""
    code: Tensor = functional().create_dynamic_map(signed=state != "exp_avg_sq")
    return code.to(device)
