"""Reading GGUF files through Transformers in a third of the time."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_LOCK = threading.RLock()
"""gguf is one for all threads: who reads beside another waits."""


@contextmanager
def quick_gguf(file: str | None) -> Iterator[None]:
    """Within, gguf's reader slices a plain array, and makes its table of names once.

    Of the seconds that Transformers takes for the vocabulary and the weights of a small model, most go into slices of
    a memory map (each an object with a dictionary) and into one table of names for each module of the model.

    Args:
        file: which GGUF file is read; None if none is, and nothing changes.
    """
    if file is None or importlib.util.find_spec("gguf") is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")

    with _LOCK:

        class Reader(gguf.GGUFReader):
            def __setattr__(self, name: str, value: Any) -> None:
                object.__setattr__(self, name, np.asarray(value) if name == "data" else value)

        reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = Reader, functools.cache(name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map
