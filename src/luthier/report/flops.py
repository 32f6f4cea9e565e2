"""What a model computes: the matrix products of a token, of attention over a document, of the head.

Counted by structure, from a model with or without weights (meta).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from luthier.adapters.experts import LoraExperts, adapted
from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.linear import linear_shape
from luthier.report.operations import AttentionFlops, LayerFlops, ModelFlops

_UNFUSED_EXPERT = re.compile(r"\.experts\.\d+\.")


def count_flops(model: Any) -> ModelFlops:
    """Count the operations of a model, by which of its parameters require gradients.

    Args:
        model: a Transformers causal language model, possibly on meta, possibly with adapters in it; whole, not sharded.
    """
    anatomy = describe(model)
    active = _active_experts(model)
    modules = dict(model.named_modules())
    embedding = modules[anatomy.embedding]
    # Whether a gradient must flow into what comes next: something before it trains.
    flows = any(parameter.requires_grad for parameter in embedding.parameters())
    layers = []
    shapes = _attention_shapes(model, len(anatomy.layers))
    for name, shape in zip(anatomy.layers, shapes, strict=True):
        layer, flows = _layer(modules, anatomy, name, shape, active, flows)
        layers.append(layer)
    flows = flows or any(p.requires_grad for p in _parameters(modules, anatomy.final_norm))
    ahead, back = _products(modules[anatomy.head], flows) if anatomy.head is not None else (0, 0)
    return ModelFlops(tuple(layers), ahead, back)


def _layer(
    modules: dict[str, nn.Module],
    anatomy: Anatomy,
    name: str,
    shape: tuple[int, int | None] | None,
    active: float,
    flows: bool,
) -> tuple[LayerFlops, bool]:
    """One layer's operations, and whether a gradient flows out of it downwards."""
    flows = flows or _own_parameters_train(modules[name])
    forward = backward = 0
    attention = None
    for stage, names in enumerate(_stages(anatomy, name)):
        trains = False
        for inner in names:
            share = active if inner in anatomy.experts or _UNFUSED_EXPERT.search(inner) else 1.0
            ahead, back = _products(modules[inner], flows)
            forward += round(ahead * share)
            backward += round(back * share)
            trains = trains or any(p.requires_grad for p in modules[inner].parameters())
        flows = flows or trains
        if stage == 0 and shape is not None:
            attention = AttentionFlops(*shape, flows)
    return LayerFlops(forward, backward, attention), flows


def _products(module: nn.Module, flows: bool) -> tuple[int, int]:
    """Operations a token of one linear layer or fused experts: forward, backward."""
    forward = backward = 0
    fused = linear_shape(module) is None
    adapters = {name.rpartition(".")[2] or "weight": adapter for name, adapter in adapted(module)}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() != (3 if fused else 2):  # the biases, which experts have in two dimensions
            continue
        each = parameter.shape[0] if fused else 1  # one expert's are counted
        once = 2 * parameter.numel() // each
        forward += once
        backward += once * (flows + parameter.requires_grad)
        if (adapter := adapters.get(name)) is not None:
            down, up = 2 * adapter.lora_A.weight.numel() // each, 2 * adapter.lora_B.weight.numel() // each
            forward += down + up
            backward += down * (1 + flows) + 2 * up
        flows = flows or parameter.requires_grad or adapter is not None  # into an expert's next matrix
    return forward, backward


def _stages(anatomy: Anatomy, layer: str) -> list[list[str]]:
    """A layer's linear modules in order: into attention, out of it, into the feed-forward part, out of it."""
    inside = f"{layer}."
    attn = [name for name in anatomy.attn if name.startswith(inside)]
    mlp = [name for name in anatomy.mlp if name.startswith(inside)]
    rest = [
        name
        for name in (*anatomy.experts, *anatomy.routers, *anatomy.others)
        if name.startswith(inside) and name not in mlp
    ]
    return [attn[:-1], attn[-1:], mlp[:-1] + rest, mlp[-1:]]


def _own_parameters_train(layer: nn.Module) -> bool:
    """Whether a norm or another parameter outside the linear modules and adapted experts of a layer trains."""
    linear = [m for m in layer.modules() if linear_shape(m) is not None or isinstance(m, LoraExperts)]
    counted = {id(p) for module in linear for p in module.parameters()}
    return any(parameter.requires_grad and id(parameter) not in counted for parameter in layer.parameters())


def _parameters(modules: dict[str, nn.Module], name: str | None) -> list[nn.Parameter]:
    return list(modules[name].parameters()) if name is not None else []


def _active_experts(model: Any) -> float:
    """What the experts' operations are multiplied by: those a token visits, or their share where each is a module."""
    config = model.config.get_text_config()
    visited = _first_int(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts") or 1
    if not any(_UNFUSED_EXPERT.search(name) for name, _ in model.named_modules()):
        return float(visited)
    return visited / (_first_int(config, "num_local_experts", "num_experts", "n_routed_experts") or visited)


def _first_int(config: Any, *names: str) -> int | None:
    """The first of some names of one thing that a config knows."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _attention_shapes(model: Any, layers: int) -> list[tuple[int, int | None] | None]:
    """(operations a query-key pair, window) of every layer; None for a layer without attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return [None] * layers
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, values = getattr(config, "qk_head_dim", None) or size, getattr(config, "v_head_dim", None) or size
    pair = 2 * heads * (keys + values)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    shapes: list[tuple[int, int | None] | None] = []
    for kind in kinds[:layers]:
        match kind:
            case "sliding_attention":
                shapes.append((pair, window))
            case "chunked_attention":
                shapes.append((pair, getattr(config, "attention_chunk_size", None)))
            case "full_attention" | "attention":
                shapes.append((pair, None))
            case _:  # recurrent layers keep a state instead
                shapes.append(None)
    return shapes + [None] * (layers - len(shapes))
