"""What the machine can do, and how much memory a run has taken."""

from __future__ import annotations

import re
import sys
import time
from functools import cache

import torch

# Dense bf16 and fp32 (TF32 off) matrix products, FLOP/s, from the makers' data sheets; the first match counts.
_GPUS: list[tuple[str, float, float]] = [
    (r"B200|GB200", 2250e12, 80e12),
    (r"H200|GH200|H100.*(SXM|HBM3)|H800", 989e12, 67e12),
    (r"H100.*NVL", 835e12, 60e12),
    (r"H100", 756e12, 51e12),
    (r"A100|A800", 312e12, 19.5e12),
    (r"L40S", 362e12, 91.6e12),
    (r"L40", 181e12, 90.5e12),
    (r"\bL4\b", 121e12, 30.3e12),
    (r"A10G", 70e12, 35e12),
    (r"\bA10\b", 125e12, 31.2e12),
    (r"RTX PRO 6000", 503e12, 125e12),
    (r"RTX 6000 Ada", 364e12, 91e12),
    (r"A6000", 155e12, 38.7e12),
    (r"RTX 5090", 210e12, 105e12),
    (r"RTX 4090", 165e12, 82.6e12),
    (r"RTX 3090", 71e12, 35.6e12),
    (r"MI300X", 1307e12, 163e12),
    (r"MI250", 383e12, 95.7e12),
]


def sheet_flops(name: str, dtype: torch.dtype) -> float | None:
    """What a GPU's data sheet promises for matrix products of a dtype; None for an unknown GPU.

    >>> sheet_flops("NVIDIA H100 80GB HBM3", torch.bfloat16), sheet_flops("NVIDIA A100-SXM4-80GB", torch.float32)
    (989000000000000.0, 19500000000000.0)
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    for pattern, bf16, fp32 in _GPUS:
        if re.search(pattern, name):
            return bf16 if dtype == torch.bfloat16 else fp32
    return None


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products: the data sheet's for a known GPU, else the best of a few products measured here.

    Measured once a process, which takes about a third of a second, with the threads that torch then uses.
    """
    if device.type == "cuda" and (known := sheet_flops(torch.cuda.get_device_name(device), dtype)) is not None:
        return known
    size = 1024 if device.type == "cpu" else 4096
    # No random numbers: a run's own must not depend on whether something was measured.
    left = right = torch.linspace(-1.0, 1.0, size * size, device=device).reshape(size, size).to(dtype)
    best = float("inf")
    deadline = time.perf_counter() + 0.3
    rounds = 0
    while rounds < 3 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
        rounds += 1
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Largest number of bytes held so far: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
