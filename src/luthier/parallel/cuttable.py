"""Whether a model can be cut into stages, tried on a small one of its kind before any weight is read.

The small model is watched while it runs: what runs before the layers and what after, in which order the layers run, and
what each is handed. Then it is cut into as many stages as it has layers, each runs alone with the others' modules taken
away, and hidden states and gradients are compared with those of the whole. So no architecture is named here, and one
whose layers share more than the hidden states is found out, however they do it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from luthier.batch import Batch, Sample
from luthier.errors import ModelError, first_line
from luthier.hf.anatomy import describe
from luthier.hf.debug.small import Kind, kind_of, make_small
from luthier.hf.forward import hidden_states
from luthier.hf.quiet import quiet
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.parallel.balance import Part
from luthier.parallel.stages import TOKENS, WIDTH, Roles, remove_others, run

_TOKENS = 9
_TOLERANCE = 1e-4
"""Of the largest entry, in fp32. Stages that lack something are off by far more."""


class _Fault(Exception):
    """Why a model cannot be cut, as a clause."""


@dataclass(slots=True)
class _Watched:
    """What was seen while a model ran."""

    calls: list[str] = field(default_factory=list)
    outputs: int = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()


def refusal(model: Any, degree: int, stages_per_rank: int = 1) -> str | None:
    """Why a model cannot be cut into stages, as a clause; None where it can.

    Args:
        model: on meta or not, with or without adapters, still whole.
        degree: ranks of the pipeline.
        stages_per_rank: stages that each of them holds.
    """
    layers, stages = len(describe(model).layers), degree * stages_per_rank
    if layers < stages:
        return f"it has {layers} layers for {stages} stages"
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    if shared:
        return f"its last {shared} layers read the keys and values of layers before them"
    try:
        roles_of(model)
    except _Fault as fault:
        return str(fault)
    return None


def roles_of(model: Any) -> Roles:
    """Which modules of a model run before, in and after its layers.

    Args:
        model: as of `refusal`, which has found nothing.
    """
    anatomy = describe(model)
    # with Transformers' own attention, since some work with no other, and the cut is the same
    small = _tried(replace(kind_of(model), attention=None), model.dtype)
    outside = set(small.before) | set(small.after)
    missing = [name for name in _with_weights(model, anatomy.layers) if name not in outside]
    if missing:
        raise _Fault(f"a small model of its kind does not have its {missing[0]}")
    return replace(small, layers=anatomy.layers)


@lru_cache(maxsize=8)
def _tried(kind: Kind, dtype: torch.dtype) -> Roles:
    """Roles of the modules of a small model, which has been cut for trial."""
    with torch.random.fork_rng(devices=[]), quiet(), torch.enable_grad():
        torch.manual_seed(0)
        try:
            model = make_small(kind, layers=4)
        except ModelError as error:
            raise _Fault(error.what) from error
        batch = _batch(model)
        unused = copy.deepcopy(model)  # some keep a state once they have run
        roles = _watch(model, batch)
        _try_cut(model, unused, roles, batch)
        if dtype != torch.float32:  # some hand on fp32 whatever their weights are
            if dtype == torch.float64 and kind.cls._can_set_experts_implementation():
                unused.set_experts_implementation("eager")  # grouped matrix products refuse float64
            roles = replace(roles, dtype=_watch(unused.to(dtype), batch).dtype)
    return roles


def _batch(model: Any) -> Batch:
    ids = np.random.default_rng(0).integers(2, model.get_input_embeddings().weight.shape[0], _TOKENS + 1)
    return Batch.pack([Sample.from_ids(ids, np.ones(_TOKENS + 1))])


def _watch(model: Any, batch: Batch) -> Roles:
    """Run the whole model and tell the roles of its modules apart.

    Raises:
        _Fault: its layers do not run one after another, or read more than hidden states.
    """
    layers = describe(model).layers
    outside = _with_weights(model, layers)
    if any(layer.startswith(f"{name}.") for name in outside for layer in layers):
        raise _Fault("weights lie beside its layers, in no module of their own")
    tied = getattr(model, "all_tied_weights_keys", {})
    if any(name.startswith(tuple(f"{layer}." for layer in layers)) for pair in tied.items() for name in pair):
        raise _Fault("its layers share weights")
    watched = _Watched()
    with _hooks(model, [*outside, *layers], layers, watched):
        try:
            hidden_states(model, batch)
        except _Fault:
            raise
        except RAISED_BY_MODELS as error:
            raise _Fault(f"a small model of its kind does not run ({first_line(error)})") from error
    order = [name for name in watched.calls if name in layers]
    if order != list(layers):
        raise _Fault("its layers do not run one after another, each once")
    first, last = watched.calls.index(layers[0]), watched.calls.index(layers[-1])
    if any(name not in layers for name in watched.calls[first:last]):
        raise _Fault("other modules with weights run between its layers")
    early = set(watched.calls[:first])
    if early & set(watched.calls[last:]):
        raise _Fault("a module runs before its layers and again after them")
    before = tuple(name for name in outside if name in early)
    after = tuple(name for name in outside if name not in early)
    return Roles(before, layers, after, watched.outputs, watched.dtype, watched.shape)


@contextmanager
def _hooks(model: Any, names: list[str], layers: tuple[str, ...], watched: _Watched) -> Iterator[None]:
    def called(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watched.calls.append(name)
            if name in layers and (more := _more_than_hidden(module, args, kwargs)):
                raise _Fault(f"its layers read {more} beside the hidden states")

        return note

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        several = isinstance(output, tuple | list)
        hidden = output[0] if several else output
        shape = tuple({_TOKENS: TOKENS, width: WIDTH}.get(n, n) for n in getattr(hidden, "shape", ()))
        if shape.count(TOKENS) != 1 or (watched.shape and watched.shape != shape):
            raise _Fault("what its layers hand on is not one row of hidden states")
        watched.dtype, watched.shape = hidden.dtype, shape
        watched.outputs = len(output) if several else 0

    width = getattr(model.config.get_text_config(), "hidden_size", None)
    handles = [model.get_submodule(name).register_forward_pre_hook(called(name), with_kwargs=True) for name in names]
    handles += [model.get_submodule(name).register_forward_hook(returned) for name in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _more_than_hidden(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name of an argument, beside the hidden states, that a gradient flows to; "" if there is none."""
    try:
        given = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs).arguments
    except TypeError:
        given = {f"argument {number}": value for number, value in enumerate(args)} | kwargs
    given = {name: value for name, value in given.items() if value is not layer}
    given |= given.pop("kwargs", {})
    for name, value in list(given.items())[1:]:
        tensors = value if isinstance(value, tuple | list) else value.values() if isinstance(value, dict) else [value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            return name
    return ""


def _with_weights(model: Any, layers: tuple[str, ...]) -> list[str]:
    """Outermost modules outside the layers that have weights of their own."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = (*layers, *found)
        if name.startswith(tuple(f"{other}." for other in inside)) or name in layers:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            found.append(name)
    return found


def _try_cut(model: Any, unused: Any, roles: Roles, batch: Batch) -> None:
    """Cut a copy of a model into a stage a layer and compare.

    Raises:
        _Fault: the stages do not give what the whole model gives.
    """
    whole = hidden_states(model, batch)
    direction = torch.randn(whole.shape)
    (whole * direction).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    stages = len(roles.layers)
    parts = [Part(index, stages, index, index + 1) for index in range(stages)]
    found: dict[str, torch.Tensor] = {}
    runs: list[tuple[Any, torch.Tensor | None, torch.Tensor]] = []
    received = None
    try:
        for part in parts:
            stage = copy.deepcopy(unused)
            stand_ins = remove_others(stage, roles, [part])
            _try_initialising(stage)
            output = run(stage, roles, part, stand_ins, batch, received)
            runs.append((stage, received, output))
            received = output.detach().requires_grad_(True)
        gradient = direction
        for stage, given, output in reversed(runs):
            output.backward(gradient)
            gradient = given.grad if given is not None else gradient
            for name, p in stage.named_parameters():
                if p.grad is not None:
                    found[name] = found[name] + p.grad if name in found else p.grad
    except _Fault:
        raise
    except RAISED_BY_MODELS as error:
        raise _Fault(f"a layer cannot run without the others ({first_line(error)})") from error
    same = found.keys() == expected.keys() and _close(runs[-1][2], whole)
    if not same or not all(_close(found[name], expected[name]) for name in expected):
        raise _Fault("its layers need more of one another than the hidden states")


@torch.no_grad()
def _try_initialising(stage: Any) -> None:
    """Let a stage be initialised as loading does it: a copy, since it gets other weights by it.

    Raises:
        _Fault: its initialisation reaches into parts that other stages have.
    """

    def walk(module: Any, owner: Any) -> None:
        for child in module.children():
            walk(child, child if hasattr(child, "_init_weights") else owner)
        owner._init_weights(module)

    stage = copy.deepcopy(stage)
    try:
        walk(stage, stage)
    except (AttributeError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise _Fault(f"its initialisation reaches into parts of other stages ({first_line(error)})") from error


def _close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((ours - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-6))
