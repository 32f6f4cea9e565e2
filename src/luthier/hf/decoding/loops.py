"""Whether compiled loops can be had here: found out by running each once, beside PyTorch's operations."""

from __future__ import annotations

import functools
import importlib
import logging
import pickle

import torch
from torch import Tensor, nn

from luthier.errors import first_line
from luthier.hf.decoding.lean_ops import Layer, Places, PlainBetween

_log = logging.getLogger(__name__)


@functools.cache
def loops_work() -> bool:
    """Whether Numba is there and compiles what `lean_cpu` and `panels` have. If not, PyTorch's operations do it.

    Numba refuses versions of NumPy and of Python that are newer than itself, and a full disk its cache. The first call
    of a process takes a second, the very first on a machine some more.
    """
    try:
        failures = importlib.import_module("numba.core.errors")
    except ImportError as error:
        _log.warning("PyTorch's operations sample in place of faster loops: %s", first_line(error))
        return False
    try:
        fault = "" if _agree() else "they compute something else here"
    except (failures.NumbaError, EOFError, ImportError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        fault = first_line(error)
    if fault:
        _log.warning("PyTorch's operations sample in place of faster loops: %s", fault)
    return not fault


@torch.no_grad()
def _agree() -> bool:
    from luthier.hf.decoding.lean_cpu import Attention, CompiledBetween
    from luthier.hf.decoding.panels import Panels, suits

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    places = Places(random(9, 4), random(9, 4), 2, 1)
    wide, narrow = (nn.RMSNorm(size, eps=1e-5, dtype=torch.float32, device="cpu") for size in (24, 4))
    layer = Layer(wide, wide, narrow, narrow, nn.SiLU(), 1.0)
    x, more, made = random(9, 24), random(9, 24), random(9, 4, 4)
    results: list[list[Tensor]] = []
    for between in (CompiledBetween(places), PlainBetween(places)):
        turned = made.clone()
        between.turned(layer, turned)
        kept = between.normed(wide, x).clone()
        added = between.added(x.clone(), more.clone(), wide)
        results.append([turned, kept, *added, between.gated(layer, x)])
    keys, values = random(9, 1, 3, 4), random(9, 1, 3, 4)
    attention = Attention(0, torch.zeros(9, dtype=torch.int64), 2, 9)(made, keys, values, 1.0)
    results[0].append(attention)
    results[1].append(made[:, 3:].expand(-1, 2, -1).flatten(1))  # of a single key: its value
    if suits(x):
        weight = random(50, 24)
        results[0].append(Panels(weight).product(x))
        results[1].append(x @ weight.T)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*results, strict=True))
