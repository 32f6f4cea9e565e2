"""LoftQ (Li et al. 2023, https://arxiv.org/abs/2310.08659): adapters that begin as what quantisation has lost.

The codes are those of W, and s B A is the best product of its rank for W - Q, by a singular value decomposition.
Further rounds quantise W - s B A, and so on: then the codes are not those of W, and the adapter fits no other base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luthier.adapters.layer import LoraLayer
from luthier.adapters.principal import one_thread, principal_part
from luthier.hf.nf4 import Nf4Weight, quantise
from luthier.hf.packing import Packing

_STARTED = "lora_started"
"""Where a layer keeps A and B between the reading of its weight and their first values."""


def rounds_of(init: str) -> int:
    """How often `adapter.init` quantises and factorises; 0 where it is not LoftQ.

    >>> rounds_of("loftq"), rounds_of("loftq_iter_5"), rounds_of("default")
    (1, 5, 0)
    """
    if not init.startswith("loftq"):
        return 0
    return int(init.rpartition("_")[2]) if init != "loftq" else 1


@dataclass(slots=True)
class LoftQ(Packing):
    """`Packing` that factorises what is lost, layer by layer, while it has the plain weight.

    Attributes:
        rounds: of `rounds_of`.
        model: whose layers they are; adapters in place.
    """

    rounds: int = 1
    model: Any = None

    @torch.no_grad()
    def pack(self, name: str, part: Tensor, like: Tensor, *, transposed: bool) -> Nf4Weight:
        layer = self.model.get_submodule(name.rpartition(".")[0])
        if not isinstance(layer, LoraLayer):
            return super(LoftQ, self).pack(name, part, like, transposed=transposed)
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32
        scale = layer.lora_spec.scale
        exact = part.to(wide)
        taken = torch.zeros_like(exact)
        with one_thread():  # as in PiSSA: a run that goes on has the very same base
            for _ in range(self.rounds):
                made = quantise(exact - taken, double=self.double, transposed=transposed)
                how: dict[str, Any] = {"shape": part.shape, "dtype": part.dtype, "pieces": made.pieces}
                packed = Nf4Weight(made.codes, made.scales, made.common, **how)
                lost = exact - packed.dense().to(wide)
                lost = lost.t().contiguous() if transposed else lost
                down, up = principal_part(lost, layer.lora_spec.rank, scale, "pissa", torch.Generator())
                product = scale * (up @ down)
                taken = product.t() if transposed else product
        layer.__dict__[_STARTED] = (down, up)
        return packed


def started(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """A and B that quantising the layer's weight has found; asked for once."""
    found: tuple[Tensor, Tensor] = layer.__dict__.pop(_STARTED)
    return found
