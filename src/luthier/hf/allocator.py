"""What libraries keep in memory: the C library what training frees and soon asks for again, oneDNN not every kernel."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Parameters of mallopt(3)."""


def bound_kernel_cache() -> None:
    """Let oneDNN keep the compiled products of about one step instead of the last 1,024.

    Packed rows have another length in every step, so the others would never be used again, and each holds memory: they
    would take more than the model of a small run. Call it before the first product; a setting of the user's own stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def tune_allocator(*, keep: bool) -> bool:
    """Say what glibc does with the memory of large tensors that are freed.

    Kept, it is there when the next one is asked for. Every large tensor is otherwise mapped afresh, and the kernel
    clears its pages one fault at a time: up to a quarter of the time of a training step on the CPU. The process keeps
    its peak of memory until its end.

    Given back, a rank takes no more than it holds. Layers that are gathered and let go leave gaps into which glibc does
    not fit the next ones (it asks for a little more than an aligned tensor takes): ranks that share a model out would
    each grow as large as a process that has it whole.

    Call it once, after the weights are loaded (what loading frees is given back before); it holds for good.

    Args:
        keep: which of the two.

    Returns:
        whether it was done: only on Linux with glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    if keep:
        return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18))  # fixed: it would rise to 32 MiB by itself
