"""From a model on meta to its sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch

from luthier.adapters.layer import LoraLayer
from luthier.estimate.shape import Growth, LayerShape, ModelShape, Share, Weight
from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.experts import find_experts
from luthier.hf.linear import linear_shape
from luthier.hf.outline import Work, outline
from luthier.hf.plans import tensor_plan
from luthier.parallel.styles import ADAPTER_PARTS, CHANGES_HANDS, COLWISE, ROWWISE, lie, lie_of_adapter
from luthier.report.flops import count_flops
from luthier.report.operations import LayerFlops

_SHORT, _LONG = (128, 256), (640, 1280)
"""Tokens of the documents that tell how what a layer keeps grows: with the tokens, and with their square. On the CPU
attention keeps its probabilities for documents of up to 512 tokens alone (hf/rows/blocked_attention.py)."""
_KEPT_UP_TO = 512


def measure(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    length: int,
    cpu: bool = False,
    quantised: Mapping[str, int] | None = None,
) -> ModelShape:
    """Take a model's sizes.

    Args:
        model: on meta, whole, adapters in place, in its training dtype, ties aliased.
        optimizer: built for it.
        length: tokens of the documents that it will see.
        cpu: it will run on the CPU.
        quantised: name of a weight that will be quantised -> bytes that it will take.
    """
    anatomy = describe(model)
    cuts = _Cuts(model)
    flops = count_flops(model)
    quantised = quantised or {}
    weights = _weights(model, optimizer, cuts, quantised)
    inside = {layer: [w for name, w in weights.items() if name.startswith(f"{layer}.")] for layer in anatomy.layers}
    of_layers = {id(w) for group in inside.values() for w in group}
    outside = {name: w for name, w in weights.items() if id(w) not in of_layers}
    before = tuple(w for name, w in outside.items() if name.startswith(f"{anatomy.embedding}."))
    after = tuple(w for w in outside.values() if all(w is not other for other in before))
    lengths = _LONG if cpu and length > _KEPT_UP_TO else _SHORT
    kinds: dict[Any, str] = {}
    kind_of = {}
    flows = any(weight.gradient for weight in before)
    for layer, counted in zip(anatomy.layers, flops.layers, strict=True):
        key = (tuple(map(astuple, inside[layer])), counted, type(model.get_submodule(layer)), flows)
        kind_of[layer] = kinds.setdefault(key, layer)
        flows = flows or any(weight.gradient for weight in inside[layer])
    works = outline(model, anatomy, {layer: key[3] for key, layer in kinds.items()}, lengths, cpu=cpu)
    shapes = {
        layer: _layer(
            model, anatomy, layer, tuple(inside[layer]), key[1], works[layer] if works else None, cuts, lengths
        )
        for key, layer in kinds.items()
    }
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    return ModelShape(
        layers=tuple(shapes[kind_of[layer]] for layer in anatomy.layers),
        before=before,
        after=after,
        tied=anatomy.tied,
        width=int(embedding.shape[-1]),
        vocabulary=int(head.weight.shape[0]) if head is not None else 0,
        itemsize=model.dtype.itemsize,
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        head_forward=flops.head_forward,
        head_backward=flops.head_backward,
        head_trains=head is not None and bool(head.weight.requires_grad),
        cpu=cpu,
        dense=max((model.get_parameter(name).nbytes for name in quantised), default=0),
        exact=works is not None,
    )


class _Cuts:
    """Where tensor and expert parallelism cut, by full names."""

    def __init__(self, model: Any) -> None:
        self.styles: Mapping[str, str] = tensor_plan(model).styles
        self.experts = {group.name: group for group in find_experts(model)}
        self.sliced = {f"{group.name}.{key}" for group in self.experts.values() for key in group.sliced}

    def lie(self, model: Any, name: str, parameter: torch.Tensor) -> tuple[int | None, bool]:
        """The dimension of a parameter that tp cuts, and whether its gradient is made in parts."""
        owner, _, leaf = name.rpartition(".")
        parent, _, matrix = owner.rpartition(".")
        if matrix in ADAPTER_PARTS:
            how = lie_of_adapter(self.styles.get(parent), matrix)
        else:
            shape = linear_shape(model.get_submodule(owner))
            style = self.styles.get(name, self.styles.get(owner))
            how = lie(style, leaf, parameter, transposed=shape is not None and shape.transposed)
        found: int | None = getattr(how.placement, "dim", None)
        in_part = self.styles.get(owner) == "moe_tp_experts" and found is None
        return None if found is None else found % max(1, parameter.ndim), how.partial or in_part


def _weights(
    model: Any, optimizer: torch.optim.Optimizer, cuts: _Cuts, quantised: Mapping[str, int]
) -> dict[str, Weight]:
    found = {}
    for name, parameter in model.named_parameters():
        states = optimizer.state.get(parameter, {}).values()
        shape = tuple(parameter.shape)
        cut, partial = cuts.lie(model, name, parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32).itemsize
        found[name] = Weight(
            name=re.sub(r"\.\d+\.", ".*.", name),
            shape=shape,
            itemsize=quantised[name] / parameter.numel() if name in quantised else parameter.element_size(),
            gradient=wide if parameter.requires_grad else 0,
            states=sum(s.numel() * s.element_size() for s in states if isinstance(s, torch.Tensor)),
            cut=cut,
            expert=name in cuts.sliced,
            partial=partial,
        )
    return found


def _layer(
    model: Any,
    anatomy: Anatomy,
    layer: str,
    weights: tuple[Weight, ...],
    flops: LayerFlops,
    works: list[dict[str, Work]] | None,
    cuts: _Cuts,
    lengths: tuple[int, int],
) -> LayerShape:
    config = model.config.get_text_config()
    prefix = f"{layer}."
    routed = _routed(model, prefix, cuts)
    modules = [name for name in cuts.experts if name.startswith(prefix)]
    if works is not None:
        kept = _shares([{name: float(w.kept) for name, w in one.items()} for one in works], prefix, cuts, lengths)
        moved = _shares([{name: float(w.moved) for name, w in one.items()} for one in works], prefix, cuts, lengths)
        operations = sum(work.operations for work in works[0].values()) + 8 * len(modules)
    else:
        kept = _from_shapes(model, anatomy, layer)
        moved = Share(*(Growth(3 * g.linear) for g in (kept.stream, kept.gathered, kept.cut)))
        operations = 40
    enters, leaves, joins = _sums(model, prefix, cuts, works[0] if works is not None else {})
    return LayerShape(
        weights=weights,
        flops=flops,
        kept=Share(kept.stream, kept.gathered, kept.cut, kept.routed + routed),
        moved=Share(moved.stream, moved.gathered, moved.cut, moved.routed + Growth(3 * routed.linear)),
        operations=operations,
        enters=enters,
        leaves=leaves,
        joins=joins,
        visited=_visited(config) if modules else 0,
        counts=sum(cuts.experts[name].count for name in modules),
        attention=_attention(config) if flops.attention is not None else None,
    )


def _sums(
    model: Any, prefix: str, cuts: _Cuts, works: dict[str, Work]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Widths of what a layer's ranks of tp sum backward, sum forward, and gather (`parallel/styles.py`)."""
    enters: list[int] = []
    leaves: list[int] = []
    joins: list[int] = []
    last = None
    modules = dict(model.named_modules())
    order = list(works) or [name.removeprefix(prefix) for name in cuts.styles if name.startswith(prefix)]
    for name in order:
        style = cuts.styles.get(prefix + name)
        module = modules.get(prefix + name)  # some styles are those of single weights
        if style not in CHANGES_HANDS or module is None:
            continue
        size = linear_shape(module)
        work = works.get(name, Work(source=len(enters), flows=True))
        if style in COLWISE and size is not None:
            if work.flows and work.source != last:
                enters.append(size.inputs)
            last = work.source  # neighbours with one input enter it together
            if style == "colwise_sections" or style.endswith(("_rep", "_output")):
                joins.append(size.outputs)
        elif style in ROWWISE and size is not None:
            leaves.append(size.outputs)
        elif style == "mla_kv_a_proj":
            enters += [model.config.get_text_config().qk_rope_head_dim] * work.flows
        elif style == "moe_tp_experts":
            width = int(model.get_input_embeddings().weight.shape[-1])
            enters += [width, _visited(model.config.get_text_config())] if work.flows else []
            leaves.append(width)
    return tuple(enters), tuple(leaves), tuple(joins)


def _visited(config: Any) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), 1)


def _attention(config: Any) -> tuple[int, int, int, int]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    latent = getattr(config, "qk_head_dim", None)
    keys = heads if latent else getattr(config, "num_key_value_heads", None) or heads
    return heads, keys, latent or size, getattr(config, "v_head_dim", None) or size


def _shares(counts: list[dict[str, float]], prefix: str, cuts: _Cuts, lengths: tuple[int, int]) -> Share:
    """Bytes that modules of a layer account for, at each of the lengths, by what tp makes of them."""
    totals: dict[str, list[float]] = {}
    parents = {name.rpartition(".")[0] for name, style in cuts.styles.items() if style in COLWISE | ROWWISE}
    for index, one in enumerate(counts):
        for name, count in one.items():
            side = _side(prefix + name, parents, cuts)
            totals.setdefault(side, [0.0] * len(counts))[index] += count
    return Share(**{side: _growth(values, lengths) for side, values in totals.items()})


def _side(name: str, parents: set[str], cuts: _Cuts) -> str:
    """What tp makes of the tensors that a module keeps: a projection its input, all around projections the rest."""
    style = cuts.styles.get(re.sub(r"\.lora_[AB]$", "", name))
    if style in COLWISE:
        return "gathered"
    if style in ROWWISE or any(name == parent or name.startswith(f"{parent}.") for parent in parents):
        return "cut"
    return "stream"


def _growth(values: list[float], lengths: tuple[int, int]) -> Growth:
    short, long = lengths
    square = (values[1] / long - values[0] / short) / (long - short)
    if abs(square) * long < 1e-3 * values[1] / long:
        square = 0.0  # rounding of small tensors that do not grow
    return Growth(max(0.0, values[1] / long - square * long), max(0.0, square))


def _routed(model: Any, prefix: str, cuts: _Cuts) -> Growth:
    """What fused experts keep: their input and output in whole, gate and up, activation and product."""
    config = model.config.get_text_config()
    total = 0
    for name in cuts.experts:
        if name.startswith(prefix):
            module = model.get_submodule(name)
            inner = [min(p.shape[1:]) for p in module.parameters(recurse=False) if p.dim() == 3]
            width = model.get_input_embeddings().weight.shape[-1]
            total += _visited(config) * (2 * width + 4 * max(inner, default=0))
    return Growth(float(total * model.dtype.itemsize))


def _from_shapes(model: Any, anatomy: Anatomy, layer: str) -> Share:
    """What layers keep that do not run in outline: inputs of norms and products, queries, keys, values, gates."""
    size = model.dtype.itemsize
    width = model.get_input_embeddings().weight.shape[-1]
    cut = 0
    for names in (anatomy.attn, anatomy.mlp):
        own = [model.get_submodule(name) for name in names if name.startswith(f"{layer}.")]
        shapes = [shape for module in own if (shape := linear_shape(module)) is not None]
        if shapes:
            cut += sum(shape.outputs for shape in shapes[:-1]) + shapes[-1].inputs
        cut += sum(module.lora_spec.rank for module in own if isinstance(module, LoraLayer))
    return Share(Growth(2.0 * width * size), Growth(2.0 * width * size), Growth(float(cut * size)))
