"""Tensor parallelism: every layer's matrices are dealt to the ranks of a group, which compute the same tokens together.

All parameters become DTensors, those that no style cuts replicated ones: so one rule serves the gradient norm, the
optimizer and checkpoints. Each decoder layer, the rest of the backbone and each other part of the model puts this
rank's plain parts in their places while its forward runs, and takes them out again. So modules, adapters and compilers
see plain tensors, and gradients come back as DTensors; those of replicated parameters of which each rank saw a part of
the use come back `Partial`, and are summed once a step (`norm.settle`), or by FSDP.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from luthier.hf.anatomy import describe
from luthier.hf.joined import joined_dims
from luthier.hf.linear import linear_shape
from luthier.hf.plans import TensorPlan, tensor_plan
from luthier.losses.vocabulary_parallel import VocabularyShard
from luthier.parallel.regions import Ring, cut, even, gather, gather_partial, total
from luthier.parallel.sequence import Slices, sequence_plan
from luthier.parallel.styles import (
    ADAPTER_PARTS,
    CHANGES_HANDS,
    COLWISE,
    POSITIONS,
    ROWWISE,
    Lie,
    Shared,
    Style,
    is_known,
    lie,
    lie_of_adapter,
)

logger = logging.getLogger(__name__)


def shard(
    model: Any,
    mesh: DeviceMesh,
    plan: TensorPlan | None = None,
    *,
    leave_alone: Collection[str] = (),
    sequence_parallel: bool = False,
    runs: Iterable[Sequence[str]] | None = None,
) -> None:
    """Cut a model in place.

    Args:
        model: on meta, adapters in place; layers of other pipeline stages may be gone.
        mesh: the ranks of tp, one-dimensional.
        plan: how; `tensor_plan(model)` when left out.
        leave_alone: full names of modules that are not touched, with all in them: experts that are dealt out whole.
        sequence_parallel: deal positions between the blocks to the ranks too, where the plan allows it (`sequence`).
        runs: names of the layers, those of each pipeline stage together; one stage when left out.
    """
    plan = plan or tensor_plan(model)
    ring = Ring.of(mesh)
    shared = Shared(ring)
    modules = {n: m for n, m in model.named_modules() if not _within(n, leave_alone)}
    styles = {name: style for name, style in plan.styles.items() if not _within(name, leave_alone)}
    owners = {name: _Hands(shared) for name in _owners(model)}
    slices = Slices()
    if sequence_parallel:
        found = sequence_plan(model, [describe(model).layers] if runs is None else runs, styles)
        if isinstance(found, Slices):
            slices = found
        else:
            logger.warning("no sequence parallelism: %s", found)
    made: dict[int, nn.Parameter] = {}
    for name, module in modules.items():
        hands = owners.get(next((owner for owner in _prefixes(name) if owner in owners), ""))
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            assert hands is not None, f"{name}.{key} belongs to no part of the model"
            how = _lie(modules, styles, name, key, parameter)
            if name in slices.local and how.placement.is_replicate():
                how = Lie(how.placement, partial=True)
            if id(parameter) not in made:
                own = distribute_tensor(parameter, mesh, [how.placement], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
            hands.parts.append((module, key, how))
        parent, _, leaf = name.rpartition(".")
        if leaf == "lora_magnitude_vector" and styles.get(parent) in ROWWISE | {"embedding_rowwise"}:
            cast(Any, module).total = functools.partial(total, ring=ring)  # each rank knows a part of every row
    head, layers = describe(model).head, set(describe(model).layers)
    for name, style in styles.items():
        if (module := modules.get(name)) is not None and style in CHANGES_HANDS:
            applied = _style(model, module, style, shared, plan, name)
            applied.entered = name in slices.entered
            owners.setdefault(name, _Hands(shared)).style = applied
    for name, keys in plan.divided.items():
        if name in modules and keys:
            _divide(modules[name], keys, owners.setdefault(name, _Hands(shared)))
    for name in slices.opens | slices.closes | slices.cut | slices.whole:
        hands = owners.setdefault(name, _Hands(shared))
        hands.opens, hands.closes = name in slices.opens, name in slices.closes
        hands.gathers = "parts" if name in slices.cut else "whole" if name in slices.whole else ""
    for name, hands in owners.items():
        module = model.get_submodule(name)
        if hands.parts or hands.style is not None or hands.heads or hands.gathers or hands.opens or hands.closes:
            module.tensor_parallel = hands
            if name in layers:
                hands.own = type(module).forward
                module.__class__ = _layer_class(cast(Any, type(module)))
            else:
                module.forward = types.MethodType(_forward, module)
    if head is not None and styles.get(head) == "colwise":
        outputs = model.get_output_embeddings().out_features
        model.get_output_embeddings().vocabulary_start = ring.span(outputs)[0]
        model.vocabulary_shard = VocabularyShard(ring.group, ring.span(outputs)[0], outputs)


def vocabulary_shard(model: Any) -> VocabularyShard | None:
    """Which tokens this rank's head has logits for; None where every rank has all."""
    return cast("VocabularyShard | None", getattr(model, "vocabulary_shard", None))


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that is cut over tp, or the parameter itself; gradients flow back into it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def refusal(model: Any, degree: int) -> str | None:
    """Why a model cannot be cut over so many ranks, as a clause; None if it can.

    Args:
        model: whole, on meta or not.
        degree: ranks of tp.
    """
    plan = tensor_plan(model)
    if plan.obstacle:
        return plan.obstacle
    modules = dict(model.named_modules())
    joined = joined_dims(model)
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter not in joined:
                continue
            how = _lie(modules, plan.styles, name, key, parameter).placement
            if isinstance(how, Shard) and how.dim % parameter.ndim in joined[parameter]:
                return f"its checkpoints hold {name}.{key} joined with others, along the side that would be cut"
    vocabulary = {describe(model).embedding, describe(model).head}
    for name, style in plan.styles.items():
        if not is_known(style):
            return f"its plan asks for the style {style!r}, which is none that Transformers 5.24 has"
        module = modules.get(name)
        if name in vocabulary or name.rpartition(".")[0] in vocabulary:
            continue
        what, count = plan.pieces.get(name, ("", 0))
        if module is not None and not what and (shape := linear_shape(module)) is not None:
            if style == "colwise":
                what, count = f"outputs of {name.rpartition('.')[2]}", shape.outputs
            elif style == "rowwise":
                what, count = f"inputs of {name.rpartition('.')[2]}", shape.inputs
        elif module is None and style in ("colwise", "rowwise", "packed_colwise", "packed_rowwise"):
            parameter = model.get_parameter(name)
            if parameter.ndim == 3:
                rows = style.endswith("colwise")
                count = parameter.shape[1 if rows else 2] // (2 if style.startswith("packed") else 1)
                what = "inner features of an expert"
        if count % degree:
            return f"{count} {what} cannot be dealt to {degree} ranks evenly"
        blocks = getattr(modules.get(name.rpartition(".")[0]), "mp_num", None)
        if isinstance(blocks, int) and blocks % degree:
            return f"its fused projection lies in {blocks} blocks, which {degree} ranks cannot share evenly"
    return None


def _within(name: str, parents: Collection[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _prefixes(name: str) -> Iterator[str]:
    """A name, its parent's, and so on up to the model's own, "" """
    while name:
        yield name
        name = name.rpartition(".")[0]


def _owners(model: Any) -> list[str]:
    """Parts whose forward puts local parts in place: every layer, the backbone around them, and what else there is."""
    anatomy = describe(model)
    return [*anatomy.layers, *(name for name, _ in model.named_children())]


def lies(model: Any) -> Iterator[tuple[str, Tensor, Lie]]:
    """Each parameter of a whole model: its full name, itself, and how it would lie on ranks of tp."""
    modules, styles = dict(model.named_modules()), tensor_plan(model).styles
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        yield name, parameter, _lie(modules, styles, owner, key, parameter)


def _lie(modules: dict[str, nn.Module], styles: dict[str, str], name: str, key: str, parameter: Tensor) -> Lie:
    parent, _, leaf = name.rpartition(".")
    if leaf in ADAPTER_PARTS and parent in modules:
        return lie_of_adapter(styles.get(parent), leaf)
    if leaf == "token_adapter":  # rows of single tokens: the table's are used alike by all, a cut head's each in part
        return Lie(Replicate(), partial=styles.get(parent) in COLWISE)
    if leaf == "virtual_tokens":
        return Lie(Replicate())
    if leaf == "attention_prefix":  # by heads, as what makes keys and values
        return Lie(Shard(0))
    if leaf == "adaption":  # the gate is used by each rank for its own heads
        return Lie(Replicate(), partial=key == "gate")
    style = styles.get(f"{name}.{key}", styles.get(name))
    shape = linear_shape(modules[name])
    how = lie(style, key, parameter, transposed=shape is not None and shape.transposed)
    # What a module does to tokens that other ranks have (experts' biases, a norm in the embedding) each sees in part.
    in_part = styles.get(name) == "moe_tp_experts" or any(
        styles.get(owner) == "embedding_rowwise" for owner in _prefixes(name)
    )
    return Lie(how.placement, partial=True) if in_part and how.placement.is_replicate() else how


def _style(model: Any, module: nn.Module, style: str, shared: Shared, plan: TensorPlan, name: str) -> Style:
    shape = linear_shape(module)
    if style == "embedding_rowwise":
        outputs = cast(nn.Embedding, module).num_embeddings
    elif style == "embedding_colwise":
        outputs = cast(nn.Embedding, module).embedding_dim
    else:
        assert shape is not None or style not in COLWISE, f"{name} is no linear layer"
        outputs = shape.outputs if shape is not None else 0
    rope = getattr(model.config.get_text_config(), "qk_rope_head_dim", 0) if style == "mla_kv_a_proj" else 0
    return Style(style, shared, plan.sections.get(name, ()), outputs, rope)


def _divide(module: Any, keys: tuple[str, ...], hands: _Hands) -> None:
    """Tell an attention module how many heads it has here."""
    size = hands.shared.ring.size
    hands.heads = next(getattr(module, key) for key in keys)
    for key in keys:
        setattr(module, key, getattr(module, key) // size)


@dataclass(slots=True)
class _Hands:
    """What the forward of one module does beside computing.

    Attributes:
        shared: of the model.
        parts: parameters to put in place, of this module and of those in it.
        style: of the module.
        heads: of an attention module that is told how many it has: all of them.
        own: forward of a layer's own class; that of the class that it has when left out.
        opens, closes: the positions are cut before it, put together behind it.
        gathers: "parts" of a block whose ranks each do a part of the work on all positions, "whole" of one that all
            run alike, "" of modules that see the own positions, or always see all.
    """

    shared: Shared
    parts: list[tuple[nn.Module, str, Lie]] = field(default_factory=list)
    style: Style | None = None
    heads: int = 0
    own: Callable[..., Any] | None = None
    opens: bool = False
    closes: bool = False
    gathers: Literal["", "parts", "whole"] = ""

    def receive(self, x: Tensor) -> Tensor:
        """The hidden states that the module is to see."""
        if self.opens:
            self.shared.tokens = x.shape[POSITIONS]
            return self._cut(x)
        return self._gather(x, self.gathers == "parts") if self.gathers else x

    def give(self, y: Tensor) -> Tensor:
        """The hidden states that the next module is to see."""
        if self.closes:
            return self._gather(y, False)
        return self._cut(y) if self.gathers == "whole" else y

    def _cut(self, x: Tensor) -> Tensor:
        """Slices of one length, so that dropout draws as many numbers on every rank, and streams stay together."""
        ring = self.shared.ring
        return cut(even(x, ring, POSITIONS), ring, POSITIONS)

    def _gather(self, x: Tensor, partial: bool) -> Tensor:
        ring = self.shared.ring
        whole = (gather_partial if partial else gather)(x, ring, POSITIONS, x.shape[POSITIONS] * ring.size)
        return whole.narrow(POSITIONS, 0, self.shared.tokens)


@functools.cache
def _layer_class(own: Any) -> type[nn.Module]:
    """A subclass of a layer's class, under the same name.

    A method of the object would not do: Transformers' layers recompute what their class calls forward, and local parts
    have to be put in place again then. It sees to the outermost of several classes, FSDP's too.
    """
    members = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return cast(type[nn.Module], type(own.__name__, (own,), {**members, "forward": _forward}))


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that tensor parallelism has a hand in."""
    hands: _Hands = self.tensor_parallel
    if hands.opens or hands.gathers:
        if args:
            args = (hands.receive(args[0]), *args[1:])
        else:
            first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            kwargs = {**kwargs, first: hands.receive(kwargs[first])}
    output = _run(self, hands, args, kwargs)
    if hands.closes or hands.gathers:
        output = (hands.give(output[0]), *output[1:]) if isinstance(output, tuple) else hands.give(output)
    return output


def _run(self: Any, hands: _Hands, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's own forward, local parts in place."""
    if hands.heads:
        kwargs = {key: _own_heads(key, value, hands) for key, value in kwargs.items()}
    own = hands.style or hands.own or type(self).forward
    if not hands.parts:
        return own(self, *args, **kwargs)
    whole = [module._parameters[key] for module, key, _ in hands.parts]
    for (module, key, how), parameter in zip(hands.parts, whole, strict=True):
        if isinstance(parameter, DTensor):
            module._parameters[key] = cast(nn.Parameter, _local_part(parameter, how, hands.shared.ring))
    try:
        return own(self, *args, **kwargs)
    finally:
        for (module, key, _), parameter in zip(hands.parts, whole, strict=True):
            module._parameters[key] = parameter
        hands.shared.forget()


def _local_part(parameter: DTensor, how: Lie, ring: Ring) -> Tensor:
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        part = parameter.to_local()
    else:
        part = parameter.to_local(grad_placements=[Partial() if how.partial else how.placement])
    return part * 0 if how.once and ring.rank else part


def _own_heads(key: str, value: Any, hands: _Hands) -> Any:
    """This rank's part of a bias that attention is given for every head: [heads, q, kv] or [batch (x) heads, q, kv]."""
    if not isinstance(value, Tensor) or key not in ("alibi", "position_bias", "attention_mask"):
        return value
    start, stop = hands.shared.ring.span(hands.heads)
    if value.ndim == 4 and value.shape[1] == hands.heads > 1:
        return value[:, start:stop]
    if value.ndim == 3 and key != "attention_mask":
        return value.unflatten(0, (-1, hands.heads))[:, start:stop].flatten(0, 1)
    return value
