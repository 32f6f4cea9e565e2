"""The styles of a tensor-parallel plan: how a module's parameters lie, and what becomes of its input and output.

Inside the forward of a layer every parameter is this rank's plain part, so modules compute as they always do, and a
style only says where activations change hands (`regions`). Their names are Transformers'; two are ours (`hf.plans`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from luthier.hf.plans import Section
from luthier.parallel.regions import Ring, cut, enter, even, gather, gather_partial, leave, reduce_cut

COLWISE = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "colwise_sections", "packed_colwise"})
ROWWISE = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
EMBEDDINGS = frozenset({"embedding_rowwise", "embedding_colwise"})
PARTIAL = frozenset({"replicated_with_grad_allreduce", "of_own_part", "sequence_parallel"})
"""Replicated modules of which each rank sees a part of the use."""
_CHANGE_HANDS = frozenset({"mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert"})
_OTHERS = frozenset({"packed_rowwise", "local_params", "replicate"})
_CUT_OUTPUT = frozenset({"colwise", "packed_colwise"})
CHANGES_HANDS = COLWISE | ROWWISE | EMBEDDINGS | _CHANGE_HANDS
"""Styles that do something to a module's input or output."""


POSITIONS = 1
"""The dimension of hidden states [batch, positions, hidden] that sequence parallelism cuts."""


@dataclass(frozen=True, slots=True)
class Lie:
    """How a parameter lies on the ranks.

    Attributes:
        placement: of the DTensor.
        partial: its gradient on each rank is a part of the sum.
        once: only the first rank uses it, the others take zeros: the bias of a sum that is made of all ranks' parts.
    """

    placement: Placement
    partial: bool = False
    once: bool = False


def is_known(style: str) -> bool:
    """Whether a style is one of those that can be applied."""
    return style in CHANGES_HANDS | PARTIAL | _OTHERS


def lie(style: str | None, name: str, parameter: Tensor, transposed: bool = False) -> Lie:
    """How a parameter of a module lies.

    Args:
        style: the module's or the parameter's own; None for what no plan names.
        name: of the parameter in its module.
        parameter: in its whole shape.
        transposed: a weight that lies as [inputs, outputs].
    """
    dims = parameter.ndim
    if style in ("packed_colwise", "packed_rowwise") and dims > 1:
        return Lie(_StridedShard(dims - 2 if style == "packed_colwise" else dims - 1, split_factor=2))
    if style in COLWISE:
        return Lie(Shard(1 if transposed and dims == 2 else max(dims - 2, 0)))
    if style in ROWWISE:
        if name == "bias":
            return Lie(Replicate(), partial=True, once=True)
        return Lie(Shard(0 if transposed and dims == 2 else dims - 1))
    if style in EMBEDDINGS:
        return Lie(Shard(0 if style == "embedding_rowwise" else 1))
    return Lie(Replicate(), partial=style in PARTIAL)


ADAPTER_PARTS = frozenset({"lora_A", "lora_B", "lora_magnitude_vector"})
"""Names of what an adapter adds to its module."""


def lie_of_adapter(style: str | None, matrix: str) -> Lie:
    """How A, B and lengths beside a module of this style lie: the cut ones as the base, the others replicated."""
    if style in COLWISE or style == "embedding_colwise":
        strided = style == "packed_colwise"
        up: Placement = _StridedShard(0, split_factor=2) if strided else Shard(0)
        return Lie(up) if matrix != "lora_A" else Lie(Replicate(), partial=True)
    if style in ROWWISE or style == "embedding_rowwise":
        return Lie(Shard(1)) if matrix == "lora_A" else Lie(Replicate(), partial=True)
    return Lie(Replicate())


@dataclass(slots=True)
class Shared:
    """What the modules of one model have in common: their ranks, and the input that siblings enter together.

    q, k and v get one tensor; entering it once lets one sum of gradients serve all three. Nothing is kept beyond the
    forward of a layer.
    """

    ring: Ring
    tokens: int = 0
    """Positions of the row that is running, of which each rank has a slice under sequence parallelism."""
    _input: Tensor | None = None
    _version: int = -1
    _entered: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """As `regions.enter`."""
        if torch.compiler.is_compiling():
            return enter(x, self.ring)
        if self._entered is None or self._input is not x or self._version != x._version:
            self._entered = enter(x, self.ring)
            self._input, self._version = x, x._version
        return self._entered

    def forget(self) -> None:
        """Let go of the last input."""
        self._input = self._entered = None


@dataclass(slots=True)
class Style:
    """A style on its module; calling it runs the module.

    Attributes:
        name: of the style.
        shared: of the model.
        sections: of "colwise_sections".
        outputs: the module's whole width, of styles that cut it.
        rope: of "mla_kv_a_proj": how many of the last outputs go to attention directly.
        entered: under sequence parallelism: the input has been gathered for all in its block, and a sum is cut again.
    """

    name: str
    shared: Shared
    sections: tuple[Section, ...] = ()
    outputs: int = 0
    rope: int = 0
    entered: bool = False

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = type(module).forward
        ring = self.shared.ring
        match self.name:
            case "colwise" | "colwise_rep" | "colwise_gather_output" | "colwise_sections" | "packed_colwise":
                x = args[0] if self.entered else self.shared.enter(args[0])
                return self._output(_project(module, own, x, *args[1:], **kwargs))
            case "rowwise":
                y = own(module, *args, **kwargs)
                return reduce_cut(even(y, ring, POSITIONS), ring, POSITIONS) if self.entered else leave(y, ring)
            case "rowwise_rep" | "rowwise_split_input":
                return leave(own(module, cut(args[0], ring, -1), *args[1:], **kwargs), ring)
            case "embedding_rowwise":
                return leave(_look_up(module, own, ring, self.outputs, *args, **kwargs), ring)
            case "embedding_colwise":
                return gather(own(module, *args, **kwargs), ring, -1, self.outputs)
            case "mla_kv_a_proj":
                y = own(module, *args, **kwargs)
                latent, rope = y.split([y.shape[-1] - self.rope, self.rope], -1)
                return torch.cat([latent, enter(rope, ring)], -1)
            case "all_reduce":
                if any(True for _ in module.parameters(recurse=False)):  # cut weights that no layer of its own enters
                    args = tuple(_entered(value, ring) for value in args)
                    kwargs = {key: _entered(value, ring) for key, value in kwargs.items()}
                y = own(module, *args, **kwargs)
                return None if y is None else leave(y, ring)
            case "moe_tp_experts":
                hidden, *routing = args
                if len(routing) > 1:  # indices and weights
                    routing[1] = enter(routing[1], ring)
                return leave(own(module, enter(hidden, ring), *routing, **kwargs), ring)
            case "moe_identity_expert":
                return own(module, args[0] / ring.size, *args[1:], **kwargs)
            case _:
                raise ValueError(f"{self.name} does nothing to a module's input or output")

    def _output(self, y: Tensor) -> Tensor:
        ring = self.shared.ring
        if self.name in _CUT_OUTPUT:
            return y
        if self.name != "colwise_sections":
            return gather(y, ring, -1, self.outputs)
        whole = gather_partial(y, ring, -1, self.outputs)
        parts = []
        for section, part in zip(self.sections, whole.split([s.size for s in self.sections], -1), strict=True):
            start, stop = (0, section.size) if section.shared else ring.span(section.size)
            parts.append(part.narrow(-1, start, stop - start))
        return torch.cat(parts, -1)


def _entered(value: Any, ring: Ring) -> Any:
    return enter(value, ring) if isinstance(value, Tensor) and value.is_floating_point() else value


def _project(module: Any, own: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The own outputs of a projection. GPT-2's kind states its whole width, by which it would shape them."""
    if not hasattr(module, "nf"):
        return cast(Tensor, own(module, x, *args, **kwargs))
    whole = module.nf
    module.nf = module.weight.shape[1]
    try:
        return cast(Tensor, own(module, x, *args, **kwargs))
    finally:
        module.nf = whole


def _look_up(module: Any, own: Any, ring: Ring, size: int, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Rows of the tokens that this rank has, zeros for the others."""
    start, stop = ring.span(size)
    here = (ids >= start) & (ids < stop)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < stop else None
    try:
        if start == stop:  # more ranks than tokens
            rows = module.weight.sum() * ids.new_zeros(*ids.shape, module.embedding_dim)
        else:
            rows = own(module, torch.where(here, ids - start, 0), *args, **kwargs)
    finally:
        module.padding_idx = padding
    return cast(Tensor, rows * here[..., None])
