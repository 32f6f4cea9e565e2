"""What libraries keep in memory: the C library what training frees and soon asks for again, oneDNN not every kernel."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


def bound_kernel_cache() -> None:
    """Let oneDNN keep the compiled products of about one step instead of the last 1,024.

    Packed rows have another length in every step, so the others would never be used again, and each holds memory: they
    would take more than the model of a small run. Call it before the first product; a setting of the user's own stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def tune_allocator() -> bool:
    """Make glibc keep freed memory instead of returning it to the system.

    Every large tensor is otherwise mapped afresh, and the kernel clears its pages one fault at a time: up to a quarter
    of the time of a training step on the CPU. Call it once, after the weights are loaded (what loading frees is given
    back before); it holds for the whole process. The process keeps its peak of memory until its end.

    Returns:
        whether it was done: only on Linux with glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
