"""Loops that Numba compiles for the processor at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.core.registry import cpu_target

FEATURES: str = cpu_target.target_context.codegen().magic_tuple()[2]
"""What code is compiled for, as Numba's cache tells it apart ("+avx512f"). Nothing else may decide on what it is."""
_NEAR_ENOUGH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be taken in another order, so that they become vectors; NaN and infinity stay what they are."""


def compiled(loops: Callable[..., Any], fastmath: set[str] = _NEAR_ENOUGH, inline: str = "never") -> Any:
    """A function that Numba compiles when it is first called, and keeps for the next process where it may write.

    It is compiled again when its own file changes, not when this one does.
    """
    settings: dict[str, Any] = {"fastmath": fastmath, "nogil": True, "error_model": "numpy", "inline": inline}
    try:
        return njit(cache=True, **settings)(loops)
    except RuntimeError:  # neither beside this file nor in the user's own folder
        return njit(**settings)(loops)


def ahead(builder: Any, place: Any) -> None:
    """Emit that the line of memory at a place will be read soon: bring it into the second cache, the first is small."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    form = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    call = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
    builder.call(call, [builder.bitcast(place, byte), word(0), word(2), word(1)])  # to be read; second cache; data
