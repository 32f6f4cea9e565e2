"""The C library's allocator, told to keep what training frees and asks for again a moment later."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""


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
