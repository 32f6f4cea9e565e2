"""Fully sharded data parallelism (torch's FSDP2): each rank keeps a shard of every weight, gradient and moment.

Every layer is a group of its own; embedding, final norm and head form the root's, so that a tied weight is in one group
and the head may be run any number of times once it has been gathered. Gradients are summed, never averaged: the weights
of the loss have been divided by those of the whole global batch already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from luthier.hf.gather import local_part

Result = TypeVar("Result")


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard: bool = True,
    cpu_offload: bool = False,
    experts: Iterable[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    joined: Mapping[nn.Parameter, Collection[int]] | None = None,
    stacked: Mapping[nn.Parameter, Collection[int]] | None = None,
    packed: Collection[nn.Parameter] = (),
) -> None:
    """Shard a model, on meta or not, in place.

    Args:
        model: the root; what is in no layer is sharded with it.
        layers: each becomes a group; those without weights are passed over.
        mesh: one-dimensional for FSDP, two-dimensional (replicas, shards) for HSDP.
        reshard: give the gathered weights of a layer back after its forward.
        cpu_offload: keep the shards in the host's memory.
        experts: modules inside the layers whose weights are dealt to other ranks.
        expert_mesh: what those weights are sharded over; None where each lies whole on one rank.
        joined: weights that must not be cut along some dimensions; they are cut along another, or stay whole.
        stacked: weights of which every rank must hold something along some dimensions; where there is too little for
            all, as joined.
        packed: weights that will be quantised. Where each rank holds all of its copy torch does not gather such.
    """
    offload: OffloadPolicy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    # Sums over ranks in fp32 whatever the weights are; float64 stays float64.
    wide = {torch.float64: torch.float64}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=wide.get(dtype, torch.float32), cast_forward_inputs=False),
        "offload_policy": offload,
    }
    dealt = list(experts)
    shards = mesh.size(mesh.ndim - 1)
    kept = {parameter: set(dims) for parameter, dims in (joined or {}).items()}
    for parameter in model.parameters():  # of these the loader cannot read nothing
        read_in_parts = 0 in (stacked or {}).get(parameter, ()) or isinstance(parameter, DTensor)
        if read_in_parts and leaves_some_without(parameter, shards):
            kept.setdefault(parameter, set()).add(0)
    elsewhere = {
        parameter: next((d for d, size in enumerate(parameter.shape) if d not in dims and size % shards == 0), None)
        for parameter, dims in kept.items()
        if 0 in dims
    }
    whole = {parameter for parameter, dim in elsewhere.items() if dim is None} | set(packed if shards == 1 else ())
    settings["ignored_params"] = of_other_dtypes(model, dtype, dealt) | whole
    settings["shard_placement_fn"] = lambda parameter: (
        Shard(dim) if (dim := elsewhere.get(parameter)) is not None else None
    )
    if expert_mesh is not None:
        for module in dealt:
            fully_shard(module, mesh=expert_mesh, reshard_after_forward=reshard, **settings)
    layers = list(layers)
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    in_several = {parameter for parameter, count in uses.items() if count > 1}  # the root's group takes these
    for layer in layers:
        if any(parameter not in in_several for parameter in layer.parameters()):
            own = settings | {"ignored_params": settings["ignored_params"] | in_several}
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **own)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                _keep_sums(group)
    model.__dict__["_within"] = MethodType(_within, model)
    register_fsdp_forward_method(model, "_within")


def leaves_some_without(parameter: torch.Tensor, shards: int) -> bool:
    """Whether a weight that is cut along its first dimension leaves a rank with nothing: five slices are 2, 2, 1, 0."""
    slices = local_part(parameter).shape[0]
    return -(-slices // shards) * (shards - 1) >= slices


def of_other_dtypes(model: nn.Module, dtype: torch.dtype, dealt: Iterable[nn.Module] = ()) -> set[nn.Parameter]:
    """What trains and is kept in another dtype than the rest (routers, decays, often in fp32).

    A group has one dtype, and many of these are read without their module being called, so that nothing would gather
    them. They are small, and stay whole on every rank.
    """
    elsewhere = {id(p) for module in dealt for p in module.parameters()}
    floating = [p for p in model.parameters() if p.is_floating_point() and p.requires_grad]
    return {p for p in floating if p.dtype != dtype and id(p) not in elsewhere}


def sum_what_is_whole(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let gradients of weights that no group shards be summed over the ranks, once in each backward pass.

    Args:
        model: sharded by `shard`, with its weights: loading replaces parameters, and what hangs on them.
        mesh: what it was sharded over.
    """
    groups = [mesh.get_group(index) for index in range(mesh.ndim)]

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()  # what autograd hands over may be somebody else's too
        for group in groups:
            dist.all_reduce(local_part(total), group=group)
        return total

    for parameter in model.parameters():
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        if parameter.requires_grad and not {"fsdp", "efsdp"} & set(names or ()):
            parameter.register_hook(summed)


def _keep_sums(group: Any) -> None:
    """Hand the gradients of bf16 weights over in fp32, as they were summed; torch would round them to bf16 first."""
    settle = group._init_mp_dtypes  # called once, when the first forward begins

    def settle_and_keep() -> None:
        settle()
        if group._reduce_dtype is None:  # the gradients' own
            return
        group._orig_dtype = group._reduce_dtype  # only the result of the reduction is cast to it
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.sharded_param.grad_dtype = group._reduce_dtype

    group._init_mp_dtypes = settle_and_keep


def within(model: nn.Module, function: Callable[..., Result], *args: Any) -> Result:
    """Call a function as if it were the model's forward: of a sharded model the root's weights are gathered for it.

    Args:
        model: sharded or not.
        function: returns tensors, or tuples of them, so that their backward pass is noticed.
        args: what it is called with.
    """
    if not isinstance(model, FSDPModule):
        return function(*args)
    result: Result = cast(Any, model)._within(function, *args)
    return result


def _within(self: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
