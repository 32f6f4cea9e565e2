"""How the layers of a model are cut for tensor parallelism: by Transformers' plan where it has one, else by ours.

A plan names modules and parameters, each with a style of Transformers ("colwise", "rowwise", ...) or with one of ours:

    colwise_sections    colwise, for a projection whose outputs are several matrices end to end ([q | k | v], or
                        [gate | up]): they are put together, and each rank takes its part of every section
    of_own_part         replicated, for a norm or activation that sees the own heads or features only

Our plans are made by structure: a projection to q, k and v, fused or not, with the output projection beside it, and a
feed-forward pair whose widths fit. What is not recognised stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.joined import joined_dims
from luthier.hf.linear import linear_shape

_ACT_ON_WEIGHT = ("colwise", "rowwise", "embedding", "packed_colwise", "mla")
"""Beginnings of the styles that act on a module's own weight; a pipeline stage holds some of these modules empty."""


@dataclass(frozen=True, slots=True)
class Section:
    """One of the matrices in a fused projection.

    Attributes:
        size: its outputs.
        shared: every rank needs all of it: the one key head of multi-query attention.
    """

    size: int
    shared: bool = False


@dataclass(slots=True)
class TensorPlan:
    """What tensor parallelism does to a model.

    Attributes:
        styles: full name of a module or parameter -> style.
        sections: module of style "colwise_sections" -> what its outputs are.
        divided: attention module -> its integer attributes that count heads or their widths; each rank has a share.
        pieces: full name of a module or parameter -> what its cut side consists of and cannot be cut within, and how
            many of them there are ("heads", 32).
        obstacle: why no layer can be cut, as a clause; "" where one is.
    """

    styles: dict[str, str] = field(default_factory=dict)
    sections: dict[str, tuple[Section, ...]] = field(default_factory=dict)
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pieces: dict[str, tuple[str, int]] = field(default_factory=dict)
    obstacle: str = ""


def tensor_plan(model: PreTrainedModel) -> TensorPlan:
    """The plan of a model, on meta or not; adapters may be in place, and layers of other stages gone.

    Embedding and head are cut along the vocabulary wherever they are plain ones, whatever Transformers' plan says: the
    logits stay where they are made, and a tied pair is one tensor.
    """
    anatomy = describe(model)
    modules = dict(model.named_modules())
    inside = tuple(f"{layer}." for layer in anatomy.layers)
    joined = joined_dims(model)
    plan = TensorPlan()
    for name, style in model._expand_parallel_plan(dict(model.tp_plan or {})).items():
        owner = modules.get(name)
        if style == "colwise" and _holds_gates_first(model, name) and model.get_parameter(name) not in joined:
            style = "packed_colwise"  # cut in one piece, one rank would have all gates, another all that they gate
        if owner is None or not style.startswith(_ACT_ON_WEIGHT) or hasattr(owner, "weight"):
            plan.styles[name] = style
    if any(name.startswith(inside) for name in plan.styles):
        _count_pieces(plan, modules)
    else:
        for layer in anatomy.layers:
            for name, module in model.get_submodule(layer).named_modules(prefix=layer):
                _plan_attention(plan, name, module)
                _plan_feed_forward(plan, name, module)
        if not any(name.startswith(inside) for name in plan.styles):
            plan.obstacle = "its layers have no attention heads and no feed-forward width that can be dealt to ranks"
    _mark_activations(plan, modules)
    plan.obstacle = plan.obstacle or _needs_the_whole(plan, modules)
    _plan_vocabulary(plan, model, anatomy)
    return plan


def _holds_gates_first(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight of experts holds their gates, then what they gate: [experts, 2 x inner, hidden]."""
    parent, _, key = name.rpartition(".")
    if key != "gate_up_proj":
        return False
    experts: Any = model.get_submodule(parent)
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, nn.Parameter) or down.ndim != 3 or not getattr(experts, "is_concatenated", False):
        return False
    return bool(experts.gate_up_proj.shape[1] == 2 * down.shape[2])


def _set(plan: TensorPlan, name: str, module: nn.Module, style: str) -> None:
    """Give a module and its own parameters a style, in the order in which Transformers lists them."""
    for parameter, _ in module.named_parameters(recurse=False):
        plan.styles[f"{name}.{parameter}"] = style
    plan.styles[name] = style


def _mark_activations(plan: TensorPlan, modules: Mapping[str, nn.Module]) -> None:
    """An activation with weights (xIELU) between a cut and a summed projection sees the own features only."""
    for name, style in list(plan.styles.items()):
        parent = modules.get(name.rpartition(".")[0])
        if style != "rowwise" or name not in modules or parent is None:
            continue
        for child, module in parent.named_children():
            full = f"{name.rpartition('.')[0]}.{child}"
            if child.startswith("act") and full not in plan.styles and any(True for _ in module.parameters()):
                _set(plan, full, module, "of_own_part")


def _needs_the_whole(plan: TensorPlan, modules: Mapping[str, nn.Module]) -> str:
    """What a module does with all heads or inner features at once, of which the plan gives it a part; "" if nothing."""
    for name, module in modules.items():
        parts: dict[int, str] = {}
        for child, layer in module.named_children():
            if plan.styles.get(full := f"{name}.{child}") == "colwise" and (shape := linear_shape(layer)) is not None:
                parts[shape.outputs] = f"outputs of {child}"
                if full in plan.pieces:
                    what, count = plan.pieces[full]
                    parts[count] = what
        kind = type(module).__name__
        for key, parameter in module.named_parameters(recurse=False):
            size = next((size for size in parameter.shape if size in parts), 0)
            if size and f"{name}.{key}" not in plan.styles:
                return f"{kind} holds {key} for all {size} {parts[size]}, of which each rank would have a part"
        sparsity: float = getattr(module, "activation_sparsity", 0.0)
        if parts and sparsity > 0:
            return f"{kind} lets the largest of its inner features pass, by mean and deviation over all of them"
    return ""


# -- vocabulary


def _plan_vocabulary(plan: TensorPlan, model: PreTrainedModel, anatomy: Anatomy) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    cuts_embedding = isinstance(embedding, nn.Embedding)
    cuts_head = anatomy.head is not None and isinstance(head, nn.Linear)
    if anatomy.tied and anatomy.head is not None and not (cuts_embedding and cuts_head):
        cuts_embedding = cuts_head = False
    for name, module, cuts, style in (
        (anatomy.embedding, embedding, cuts_embedding, "embedding_rowwise"),
        (anatomy.head, head, cuts_head, "colwise"),
    ):
        if name is None or not isinstance(module, nn.Module):
            continue
        for key in [key for key in plan.styles if key == name or key.startswith(f"{name}.")]:
            del plan.styles[key]
        if cuts and hasattr(module, "weight"):
            _set(plan, name, module, style)


# -- how finely the projections of Transformers' plans may be cut


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTHS = ("split_size", "embed_dim", "hidden_size", "d_model_size", "all_head_size")
_KV_WIDTHS = ("kv_dim",)


def _integer(module: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _count_pieces(plan: TensorPlan, modules: Mapping[str, nn.Module]) -> None:
    for name, style in plan.styles.items():
        module = modules.get(name)
        if module is None or style != "colwise" or (shape := linear_shape(module)) is None:
            continue
        parent = modules[name.rpartition(".")[0]]
        heads, size = _integer(parent, _HEADS), _integer(parent, ("head_dim",))
        if heads is None:
            heads = _integer(getattr(parent, "config", None), _HEADS) if size is not None else None
        if heads is None:
            continue  # a feed-forward part
        if size and not hasattr(parent, "kv_lora_rank") and shape.outputs % size == 0:
            count = shape.outputs // size
            plan.pieces[name] = ("attention heads" if count >= heads else "key and value heads", count)
        elif shape.outputs % heads == 0:
            plan.pieces[name] = ("attention heads", heads)


# -- plans of our own


_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("Wq", "Wk", "Wv"))
_FUSED = ("query_key_value", "c_attn", "Wqkv")
_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "Wo")
_PER_HEAD_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def _plan_attention(plan: TensorPlan, name: str, module: nn.Module) -> None:
    """Cut an attention module by heads, if it is of a form that is known."""
    children = dict(module.named_children())
    heads, head_dim = _integer(module, _HEADS), _integer(module, ("head_dim", "head_size"))
    output = next((child for child in _OUTPUT if child in children), None)
    if output is None or (out := linear_shape(children[output])) is None or not (heads or head_dim):
        return
    heads = heads or out.inputs // (head_dim or 1)
    head_dim = out.inputs // heads
    forms: list[tuple[str, ...]] = [*_SEPARATE, *((child,) for child in _FUSED)]
    inputs = next((form for form in forms if set(form) <= set(children)), None)
    if inputs is None:
        return
    shapes = [linear_shape(children[child]) for child in inputs]
    if any(shape is None for shape in shapes):
        return
    widths = [shape.outputs for shape in shapes if shape is not None]
    kv_heads = _integer(module, _KV_HEADS) or (widths[-1] // head_dim if len(widths) > 1 else heads)
    if heads * head_dim != out.inputs or sum(widths) != (heads + 2 * kv_heads) * head_dim:
        return
    own = dict(module.named_parameters(recurse=False))
    known = {*inputs, output}
    norms = [child for child in _PER_HEAD_NORM if child in children]
    others = [child for child in children if child not in known and any(True for _ in children[child].parameters())]
    if others != [child for child in others if child in norms] or any(p.shape != (heads,) for p in own.values()):
        return  # something of a form that is not known would see the own heads only
    if any(p.shape != (head_dim,) for child in norms for p in children[child].parameters()):
        return  # a norm over all heads, or of another weight for each
    shared = bool(getattr(module, "multi_query", False)) and not getattr(module, "new_decoder_architecture", False)
    shared = shared and kv_heads == 1
    sections = None
    if len(inputs) == 1:
        thirds = inputs[0] == "Wqkv" or (inputs[0] == "c_attn" and shapes[0] is not None and shapes[0].transposed)
        if thirds or shared:
            kv = Section(kv_heads * head_dim, shared)
            sections = (Section(heads * head_dim), kv, kv)
    for child in inputs:
        full = f"{name}.{child}"
        _set(plan, full, children[child], "colwise" if sections is None else "colwise_sections")
        if sections is not None:
            plan.sections[full] = sections
        plan.pieces[full] = ("attention heads", heads)
        if kv_heads != heads and not shared:
            plan.pieces[full] = ("key and value heads", kv_heads)
    _set(plan, f"{name}.{output}", children[output], "rowwise")
    plan.pieces[f"{name}.{output}"] = ("attention heads", heads)
    for parameter in own:
        plan.styles[f"{name}.{parameter}"] = "colwise"
    for child in norms:
        _set(plan, f"{name}.{child}", children[child], "of_own_part")
    counted = [*_HEADS, *_WIDTHS, *(("num_key_value_groups",) if shared else (*_KV_HEADS, *_KV_WIDTHS))]
    plan.divided[name] = tuple(key for key in counted if isinstance(getattr(module, key, None), int))


_FEED_FORWARD: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("Wi",), "Wo"),
    (("0",), "2"),
)


def _plan_feed_forward(plan: TensorPlan, name: str, module: nn.Module) -> None:
    """Cut a feed-forward part by its inner width, if it is of a form that is known."""
    children = dict(module.named_children())
    for ups, down in _FEED_FORWARD:
        if not {*ups, down} <= set(children) or ("0" in ups and not isinstance(module, nn.Sequential)):
            continue
        up_shapes = [linear_shape(children[up]) for up in ups]
        down_shape = linear_shape(children[down])
        if down_shape is None or any(shape is None for shape in up_shapes):
            continue
        widths = {shape.outputs for shape in up_shapes if shape is not None}
        gated = ups == ("Wi",) and widths == {2 * down_shape.inputs}
        if widths != {down_shape.inputs} and not gated:
            continue
        others = [child for key, child in children.items() if key not in {*ups, down}]
        lies_in_layer = any(linear_shape(inner) is not None for child in others for inner in child.modules())
        normed = any(p.shape == (down_shape.inputs,) for child in others for p in child.parameters())
        if normed and not (lies_in_layer and down_shape.inputs == down_shape.outputs):
            return  # a norm over the whole inner width
        for up in ups:
            _set(plan, f"{name}.{up}", children[up], "colwise_sections" if gated else "colwise")
            plan.pieces[f"{name}.{up}"] = ("inner features", down_shape.inputs)
            if gated:
                plan.sections[f"{name}.{up}"] = (Section(down_shape.inputs), Section(down_shape.inputs))
        _set(plan, f"{name}.{down}", children[down], "rowwise")
        plan.pieces[f"{name}.{down}"] = ("inner features", down_shape.inputs)
        return
