"""What each layer keeps for its backward pass, found by running the layer itself without numbers.

The layer runs on meta (or, for the ways of the CPU, on memory that nobody fills), and every tensor that autograd keeps
is noted with the module that was at work, and so are the bytes that operations move. Nothing needs to be known about
the architecture. Two things are stood in for: attention, whose kernels keep queries, keys, values, the output and a
number a row, and fused experts, whose routing needs numbers (whoever asks adds what they keep).
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from luthier.errors import first_line
from luthier.hf.anatomy import Anatomy, text_backbone
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.quiet import quiet
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.rows import attention as luthier_attention
from luthier.hf.rows.documents import documents

_NAME = "luthier_outline"
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_NO_KERNEL = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """What one module of a layer did, without its children.

    Attributes:
        kept: bytes kept for the backward pass; a tensor counts for the module that kept it first.
        moved: bytes read and written by operations that are no matrix products.
        operations: kernels started.
        source: the same number for modules that were called with the very same tensor.
        flows: that tensor needs a gradient.
    """

    kept: int = 0
    moved: int = 0
    operations: int = 0
    source: int = 0
    flows: bool = False


class _ReachedError(Exception):
    """Carries the arguments of the first layer."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs


def outline(
    model: PreTrainedModel,
    anatomy: Anatomy,
    layers: Mapping[str, bool],
    lengths: Sequence[int],
    *,
    cpu: bool = False,
) -> dict[str, list[dict[str, Work]]] | None:
    """What some layers do and keep in the forward pass of one document.

    Args:
        model: on meta, adapters in place, in its training dtype. It is left as it was.
        anatomy: its parts.
        layers: names of the layers to run, and whether a gradient flows to what comes before each.
        lengths: of the documents to run them on, one after another.
        cpu: run them as on the CPU, with its norms and MLPs and attention in blocks, which takes the memory of a layer.

    Returns:
        of each layer, for each length, name of a module within the layer ("" for itself) -> its work, in the order of
        their calls. Parameters and buffers are not counted as kept. None where the architecture does not run so.
    """
    device = "cpu" if cpu else "meta"
    try:
        with quiet(), _prepared(model, anatomy, layers, cpu) as own:
            calls = [_first_call(own, anatomy, length, device) for length in lengths]
            return {
                name: [_run(own.get_submodule(name), flows, *call) for call in calls] for name, flows in layers.items()
            }
    except RAISED_BY_MODELS as error:  # it asks something else of its arguments
        _log.warning(
            "%s is estimated by its structure, since it does not run in outline: %s",
            type(model).__name__,
            first_line(error),
        )
        return None


@contextmanager
def _prepared(model: PreTrainedModel, anatomy: Anatomy, layers: Iterable[str], cpu: bool) -> Iterator[PreTrainedModel]:
    """A copy that shares nothing, with stand-ins in place."""
    keep = {*layers, anatomy.layers[0]}
    # of a hundred layers most are like another: they need no copy, for nothing runs them
    idle = {id(model.get_submodule(name)): nn.Identity() for name in anatomy.layers if name not in keep}
    own = copy.deepcopy(model, idle).train()
    for name in anatomy.experts:
        if name.startswith(tuple(f"{layer}." for layer in keep)):
            own.get_submodule(name).__dict__["forward"] = _routed
    if cpu:
        accelerate_model(own)
        inside = tuple(f"{name}." for name in (*anatomy.layers, anatomy.embedding))
        for name, module in own.named_modules():
            wanted = any(name == layer or name.startswith(f"{layer}.") for layer in keep)
            if wanted or not (name.startswith(inside) or f"{name}." in inside or name == anatomy.head):
                _materialise(module)
        own.config._attn_implementation = luthier_attention.register_attention()
    else:
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
        own.config._attn_implementation = _NAME
    yield own


def _materialise(module: nn.Module) -> None:
    """Give a module's own tensors memory, with numbers that do no harm."""
    for name, parameter in module.named_parameters(recurse=False):
        filled = torch.full(parameter.shape, 0.5, dtype=parameter.dtype)
        setattr(module, name, nn.Parameter(filled, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))


def _first_call(
    model: PreTrainedModel, anatomy: Anatomy, tokens: int, device: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the backbone gives to its first layer."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    width = model.get_input_embeddings().weight.shape[-1]  # type: ignore[index]
    embeds = torch.zeros(1, tokens, int(width), dtype=model.dtype, device=device)
    handle = model.get_submodule(anatomy.layers[0]).register_forward_pre_hook(stop, with_kwargs=True)
    # a mask of ones keeps Transformers from looking for packed documents in positions, which have no numbers on meta
    mask = {"attention_mask": torch.ones(1, tokens, dtype=torch.int64, device=device)} if device == "meta" else {}
    try:
        with _row(tokens, device):
            text_backbone(model)(inputs_embeds=embeds, use_cache=False, **mask)
    except _ReachedError as reached:
        return reached.call
    finally:
        handle.remove()
    raise RuntimeError("the first layer was not reached")


@contextmanager
def _row(tokens: int, device: str) -> Iterator[None]:
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(documents(torch.tensor([0, tokens], dtype=torch.int32)))
        yield


def _run(layer: nn.Module, flows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Work]:
    """One layer under watch."""
    names = {module: name for name, module in layer.named_modules()}
    given = [argument for argument in args if isinstance(argument, torch.Tensor)]
    hidden = given[0] if given else kwargs["hidden_states"]
    leaf = hidden.detach().clone().requires_grad_(flows)
    args = tuple(leaf if argument is hidden else argument for argument in args)
    kwargs = {name: leaf if value is hidden else value for name, value in kwargs.items()}
    # what all layers share (angles of rotary embeddings) is no layer's own
    shared = [v for value in kwargs.values() for v in (value if isinstance(value, tuple) else (value,))]
    outside = [t for t in shared if isinstance(t, torch.Tensor) and t is not leaf]
    watch = _Watch({_storage(t) for t in (*layer.parameters(), *layer.buffers(), *outside)})

    def begin(module: nn.Module, given: tuple[Any, ...]) -> None:
        watch.begin(names[module], given[0] if given and isinstance(given[0], torch.Tensor) else None)

    def end(module: nn.Module, *_: Any) -> None:
        watch.working.pop()

    hooks = [hook for m in names for hook in (m.register_forward_pre_hook(begin), m.register_forward_hook(end))]
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor),
            watch,
            _row(hidden.shape[1], hidden.device.type),
        ):
            layer(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for name, (kept, moved, operations) in watch.counts.items():
        source, needs = watch.sources.get(name, (0, False))
        found[name] = Work(kept, moved, operations, source, needs)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    """Notes what happens, for the module that is at work."""

    def __init__(self, outside: set[int]) -> None:
        super().__init__()
        self.outside = outside
        self.working: list[str] = []
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.sources: dict[str, tuple[int, bool]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._inputs: list[torch.Tensor] = []

    def begin(self, name: str, given: torch.Tensor | None) -> None:
        self.working.append(name)
        _ = self.counts[name]  # there even if the module does nothing itself, in the order of calls
        if given is not None and name not in self.sources:
            known = next((i for i, other in enumerate(self._inputs) if other is given), len(self._inputs))
            self._inputs += [given] if known == len(self._inputs) else []
            self.sources[name] = (known, given.requires_grad)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in self._kept and key not in self.outside:
            self._kept[key] = tensor  # held, so that no other storage gets its place
            self._here[0] += tensor.untyped_storage().nbytes()
        return tensor

    @property
    def _here(self) -> list[int]:
        return self.counts[self.working[-1] if self.working else ""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        known = {_storage(tensor) for tensor in inputs}
        writes = func._schema.is_mutable or any(_storage(tensor) not in known for tensor in outputs)
        if writes and func.overloadpacket not in _NO_KERNEL:
            here = self._here
            here[2] += 1
            if func.overloadpacket not in _PRODUCTS:
                here[1] += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        return result


class _Attended(torch.autograd.Function):
    """Keeps what a fused attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(batch, heads, length, dtype=torch.float32))
        return output


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    own = luthier_attention.own_attention(module, kwargs)
    if own is luthier_attention.sdpa_attention_forward:
        return _Attended.apply(query.contiguous(), key.contiguous(), value.contiguous()), None
    mask = luthier_attention._additive(None, query, key)
    return own(module, query, key, value, mask, **kwargs)[0], None


def _routed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In the place of fused experts: the same shape, nothing kept."""
    return hidden_states * math.pi
