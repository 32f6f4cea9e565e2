"""Weights of chosen layers quantised as they are read, one at a time: the plain model never exists.

Transformers' loader asks its quantiser of each weight whether it is to be quantised, reads such a weight only when its
turn has come, and sets what the quantiser makes of it in its place. `OnTheFly` is such a quantiser and nothing else: no
class of module changes, and nothing is written into the model's config.

On a layout each rank reads its part alone. Codes and scales of a part are those of the whole weight as long as no block
of 64 is cut; the second quantisation is over all scales, which the ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from luthier.hf.gather import blocks, coordinate_of
from luthier.hf.linear import linear_shape
from luthier.hf.nf4 import BLOCK, Nf4Weight, Outer, codes_of, quantise, quantise_scales


@dataclass(slots=True)
class Packing:
    """Which weights of a model are to be quantised, and how; who lays the model out fills it in.

    Attributes:
        double: quantise the scales too.
        names: full names of the weights.
    """

    double: bool
    names: Collection[str] = ()

    @torch.no_grad()
    def pack(self, name: str, part: Tensor, like: Tensor, *, transposed: bool) -> Nf4Weight:
        """What this rank holds of a weight, quantised.

        Args:
            name: of the weight.
            part: all of it, or of a DTensor the local part.
            like: the parameter. All ranks of its mesh make the call.
            transposed: it is of a layer whose weight lies as [inputs, outputs].
        """
        if not isinstance(like, DTensor) or all(placement.is_replicate() for placement in like.placements):
            return quantise(part, double=self.double, transposed=transposed)
        codes, scales = codes_of(part.t() if transposed else part)
        how: dict[str, Any] = {"shape": part.shape, "dtype": part.dtype, "pieces": int(transposed)}
        if not self.double:
            return Nf4Weight(codes, scales, None, **how)
        coordinate = coordinate_of(like, dist.get_rank())
        assert coordinate is not None
        ((here, place),) = blocks(like, coordinate)
        rows, columns = like.shape[0], like.shape[1]
        if transposed:
            here, place, rows, columns = here[::-1], place[::-1], columns, rows
        columns //= BLOCK
        start = (place[0].start, place[1].start // BLOCK)
        # every part in its place, zeros elsewhere: the sum is the whole, exactly
        kind = like.device_mesh.device_type  # ranks talk by it, also where shards stay with the host
        whole = scales.new_zeros(rows, columns, device=scales.device if kind == scales.device.type else kind)
        shape = (here[0].stop, here[1].stop // BLOCK)
        whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]] = scales.to(whole.device).view(shape)
        for index, placement in enumerate(like.placements):
            if not placement.is_replicate():
                dist.all_reduce(whole, group=like.device_mesh.get_group(index))
        found, outer = quantise_scales(whole.view(-1).to(scales.device))
        own = found.view(rows, columns)[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
        outer = Outer(outer.scales, outer.mean, (*start, columns))
        return Nf4Weight(codes, own.reshape(-1).clone(), outer, **how)

    def finish(self, model: nn.Module) -> None:
        """Quantise what was not read from a checkpoint of plain weights: drawn at random, or unpacked from GGUF."""
        for name in self.names:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            parameter = module._parameters[leaf]
            assert parameter is not None
            local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
            if isinstance(local, Nf4Weight):
                continue
            made: Tensor = self.pack(name, local, parameter, transposed=is_transposed(module))
            if isinstance(parameter, DTensor):
                mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
                made = DTensor.from_local(made, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)
            module._parameters[leaf] = nn.Parameter(made, requires_grad=False)


class OnTheFly:
    """What Transformers' loader asks of a quantiser, as `LoadStateDictConfig.hf_quantizer`."""

    pre_quantized = False
    quant_method = None

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        self._model, self._packing = model, packing
        self.quantization_config = self

    def param_needs_quantization(self, model: nn.Module, name: str) -> bool:
        return name in self._packing.names

    def param_element_size(self, model: nn.Module, name: str, parameter: Tensor) -> float:
        """Bytes, by which memory on the device is set aside beforehand."""
        return 0.52 if name in self._packing.names else parameter.element_size()

    def get_quantize_ops(self) -> OnTheFly:
        return self

    def convert(self, tensors: dict[str, Any], **rest: Any) -> dict[str, Any]:
        """The weights that one entry of the checkpoint makes, those that are to be quantised quantised."""
        made = {}
        for name, value in tensors.items():
            tensor = value[0] if isinstance(value, list) else value
            if name in self._packing.names:
                like = self._model.get_parameter(name)
                if tensor.shape == _local_shape(like):  # of another shape: the loader says so
                    transposed = is_transposed(self._model.get_submodule(name.rpartition(".")[0]))
                    tensor = self._packing.pack(name, tensor, like, transposed=transposed)
            made[name] = tensor
        return made


def _local_shape(parameter: Tensor) -> torch.Size:
    return parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer's weight lies as [inputs, outputs]."""
    shape = linear_shape(module)
    return shape is not None and shape.transposed


def cut_blocks(parameter: Tensor, *, transposed: bool) -> str | None:
    """Why a weight on meta cannot be quantised as it lies on the ranks, as a clause; None if it can.

    Args:
        parameter: a DTensor whose parts are to hold whole blocks, as many rows on each rank.
        transposed: it is of a layer whose weight lies as [inputs, outputs], and rows are outputs.
    """
    if not isinstance(parameter, DTensor):
        return None
    coordinate = coordinate_of(parameter, dist.get_rank())
    assert coordinate is not None
    if len(list(blocks(parameter, coordinate))) != 1:
        return "its outputs are dealt out in several pieces"
    ranks = {0: 1, 1: 1}
    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    for index, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        if placement.is_replicate():
            continue
        dim = placement.dim % parameter.ndim  # type: ignore[attr-defined]
        if name in ("fsdp", "efsdp") and dim:
            return "dp_shard and cp would cut its columns, since its rows are joined with others in checkpoints"
        ranks[dim ^ transposed] *= parameter.device_mesh.size(index)
    rows, columns = reversed(parameter.shape) if transposed else parameter.shape
    if rows % ranks[0]:
        return f"its {rows} rows cannot be dealt evenly to {ranks[0]} ranks"
    if ranks[0] * ranks[1] > 1 and columns % (ranks[1] * BLOCK):
        here = f" on {ranks[1]} ranks" if ranks[1] > 1 else ""
        return f"its rows of {columns} numbers{here} are no whole blocks of {BLOCK}"
    return None
