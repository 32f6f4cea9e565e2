"""Luthier fine-tunes any Hugging Face causal language model, exactly.

As a library: `load` a model (with or without adapters), `forward_backward` and `optim_step` in a loop of your own,
`evaluate`, `generate`, `save`. `examples/own_loop.py` is a whole loop in 30 lines. The names below are imported when
they are first used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luthier.batch import Batch, Sample
    from luthier.config import LoraConfig, RunConfig, load_config
    from luthier.engine.state import TrainState
    from luthier.engine.step import forward_backward, optim_step
    from luthier.errors import UserError
    from luthier.recipes.library import evaluate, generate, load, logprobs, pack, read_rows, save
    from luthier.recipes.methods import train

__version__ = "0.1.0"

_HOME = {
    "Batch": "luthier.batch",
    "LoraConfig": "luthier.config",
    "RunConfig": "luthier.config",
    "Sample": "luthier.batch",
    "TrainState": "luthier.engine.state",
    "UserError": "luthier.errors",
    "evaluate": "luthier.recipes.library",
    "forward_backward": "luthier.engine.step",
    "generate": "luthier.recipes.library",
    "load": "luthier.recipes.library",
    "load_config": "luthier.config",
    "logprobs": "luthier.recipes.library",
    "optim_step": "luthier.engine.step",
    "pack": "luthier.recipes.library",
    "read_rows": "luthier.recipes.library",
    "save": "luthier.recipes.library",
    "train": "luthier.recipes.methods",
}

__all__ = [
    "Batch",
    "LoraConfig",
    "RunConfig",
    "Sample",
    "TrainState",
    "UserError",
    "evaluate",
    "forward_backward",
    "generate",
    "load",
    "load_config",
    "logprobs",
    "optim_step",
    "pack",
    "read_rows",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'luthier' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
