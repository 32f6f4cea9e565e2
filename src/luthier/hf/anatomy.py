"""Where a model's parts are: embedding, layers, final norm, head, and which of its linear layers play which role.

Everything is found by structure: what Transformers itself calls the embedding and the head, the list that holds most of
the weights, and the names on the way from a layer to a linear module. No architecture is named here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from luthier.errors import ModelError

LinearLike = (nn.Linear, Conv1D)
"""Modules that multiply by one matrix: torch's, and GPT-2's that keeps it transposed."""

_ATTENTION = re.compile(
    r"att(n|ention)?$|att(n|ention)?_|_att(n|ention)?|mixer|mamba|temporal_block|recurrent|conv$|short_conv"
)
_MLP = re.compile(r"mlp|ffn|feed_forward|feedforward|moe|expert|fc\d?$|fc_|^ff$|dense|intermediate|^output$|linear")
_ROUTER = re.compile(r"^(gate|router|.*_gate|wg|gating)$")
_ROUTER_CLASS = re.compile(r"Router")
_NOT_ADAPTED = re.compile(r"indexer|compressor|norm|_hc$|residual")
_STATEFUL = re.compile(r"[Mm]amba|SSM|R[Ww][Kk][Vv]|Recurrent|Rglru|Delta|LSTM|ShortConv|LinearAtt|Lightning")


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of modules, all relative to the model.

    Attributes:
        backbone: what turns tokens into hidden states ("model").
        embedding: the token embedding.
        layers: every decoder layer, in order.
        final_norm: the norm after the last layer; None if there is none.
        head: the module that turns hidden states into logits; None if the model has none of its own.
        tied: the head's weight is the embedding's.
        attn: linear modules of attention, or of what stands in its place (state space mixers).
        mlp: linear modules of the feed-forward part, shared and unfused experts included.
        unembed: the head, if it is linear.
        routers: linear modules that choose experts; in no role.
        others: linear modules of the layers in no role.
        experts: modules that hold many experts' weights in 3-D parameters, which are no linear modules.
        attention_only: positions of a row meet in attention alone, so documents can be kept apart there.
        vision_attn: of the eyes, linear modules of attention.
        vision_mlp: of the eyes, all other linear modules.
        projector: linear modules between eyes and text.
    """

    backbone: str
    embedding: str
    layers: tuple[str, ...]
    final_norm: str | None
    head: str | None
    tied: bool
    attn: tuple[str, ...]
    mlp: tuple[str, ...]
    unembed: tuple[str, ...]
    routers: tuple[str, ...]
    others: tuple[str, ...]
    experts: tuple[str, ...]
    attention_only: bool
    vision_attn: tuple[str, ...] = ()
    vision_mlp: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Role -> linear modules that play it; attn and mlp are those of the text."""
        eyes = {"vision_attn": self.vision_attn, "vision_mlp": self.vision_mlp, "projector": self.projector}
        found = {"vision": (*self.vision_attn, *self.vision_mlp), **eyes} if any(eyes.values()) else {}
        return {"attn": self.attn, "mlp": self.mlp, "unembed": self.unembed, **found}

    @property
    def eyes(self) -> frozenset[str]:
        """Linear modules that run for pictures alone."""
        return frozenset((*self.vision_attn, *self.vision_mlp, *self.projector))

    @property
    def all_linear(self) -> tuple[str, ...]:
        """Every linear module of the layers but the routers; not the head."""
        return (*self.attn, *self.mlp, *self.others)


def describe(model: PreTrainedModel) -> Anatomy:
    """Find a model's parts; it may be on meta, and may have adapters in it.

    Raises:
        ModelError: the model has no layers.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    decoder = text_backbone(model)
    layers = _layers(decoder)
    found: dict[str, list[str]] = {role: [] for role in ("attn", "mlp", "router", "other", "experts")}
    for layer in layers:
        experts: list[str] = []
        for inner, module in layer.named_modules():
            name = names[id(module)]
            if isinstance(module, LinearLike):
                parent = layer.get_submodule(inner.rpartition(".")[0])
                if isinstance(parent, LinearLike):
                    continue  # an adapter's own matrices
                found[_role(inner, parent)].append(name)
            elif any(name.startswith(f"{outer}.") for outer in experts):
                continue  # adapters of experts
            elif any(p.dim() == 3 for p in module.parameters(recurse=False)) and not isinstance(module, nn.Conv1d):
                experts.append(name)
        found["experts"] += experts
    head_name = names.get(id(head)) if head is not None else None
    return Anatomy(
        backbone=backbone_name(model),
        embedding=names[id(embedding)],
        layers=tuple(names[id(layer)] for layer in layers),
        final_norm=_final_norm(decoder, names),
        head=head_name,
        tied=_is_tied(model, head_name, names[id(embedding)]),
        attn=tuple(found["attn"]),
        mlp=tuple(found["mlp"]),
        unembed=(head_name,) if head_name is not None and isinstance(head, LinearLike) else (),
        routers=tuple(found["router"]),
        others=tuple(found["other"]),
        experts=tuple(found["experts"]),
        attention_only=_stateful(layers) is None,
        **_eyes(model, decoder, names),
    )


def _eyes(model: PreTrainedModel, decoder: nn.Module, names: dict[int, str]) -> dict[str, tuple[str, ...]]:
    """What a model sees with: the parts of its backbone that are beside the decoder of text. Those that have layers are
    eyes, the others bring to the text what these see."""
    backbone = getattr(model, backbone_name(model))
    inside = names[id(decoder)]
    found: dict[str, list[str]] = {"vision_attn": [], "vision_mlp": [], "projector": []}
    if backbone is decoder or not inside.startswith(f"{names[id(backbone)]}."):
        return {}
    for part in backbone.children():
        if inside == names[id(part)] or inside.startswith(f"{names[id(part)]}."):
            continue
        layered = bool(_lists(part))
        for name, module in part.named_modules():
            parent = part.get_submodule(name.rpartition(".")[0]) if name else backbone
            # torch's own attention reads its matrices itself, past whatever is put into them
            if not isinstance(module, LinearLike) or isinstance(parent, (*LinearLike, nn.MultiheadAttention)):
                continue
            attention = _role(re.split(r"\.\d+\.", name)[-1], parent) == "attn"
            found["projector" if not layered else "vision_attn" if attention else "vision_mlp"].append(
                names[id(module)]
            )
    return {role: tuple(modules) for role, modules in found.items()}


def stateful_part(model: PreTrainedModel) -> str | None:
    """Class of the first module in which positions of a row meet outside attention; None if there is none."""
    return _stateful(_layers(text_backbone(model)))


def _stateful(layers: list[nn.Module]) -> str | None:
    inside = (module for layer in layers for module in layer.modules())
    found = (m for m in inside if isinstance(m, nn.Conv1d) or _STATEFUL.search(type(m).__name__))
    return next((type(module).__name__ for module in found), None)


def backbone_name(model: PreTrainedModel) -> str:
    """Name of the child that `forward` runs before the head ("model", "transformer")."""
    base = model.base_model if model.base_model is not model else text_backbone(model)
    return next(name for name, child in model.named_children() if child is base)


def text_backbone(model: PreTrainedModel) -> nn.Module:
    """The part that turns tokens into hidden states; of a model with eyes or ears the part that reads text."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(decoder, nn.Module) and decoder is not model and _lists(decoder):
        return decoder
    if model.base_model is not model:
        return model.base_model
    # some classes carry the prefix of the multimodal model that they are a part of
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def _lists(module: nn.Module) -> list[tuple[int, int, nn.ModuleList]]:
    """[(depth, weights, list)] of the module lists that hold modules with weights."""
    found = []
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and (weights := sum(p.numel() for p in child.parameters())):
            found.append((name.count("."), weights, child))
    return found


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder layers: the list with most weights, of lists within lists the outer one."""
    lists = _lists(decoder)
    if not lists:
        raise ModelError(f"{type(decoder).__name__} holds no layers", where="model", remedy="choose another model")
    most = max(weights for _, weights, _ in lists)
    depth, _, chosen = min((entry for entry in lists if entry[1] == most), key=lambda entry: entry[0])
    kinds = {type(layer) for layer in chosen}
    siblings = [entry[2] for entry in lists if entry[0] == depth and {type(layer) for layer in entry[2]} <= kinds]
    return [layer for group in siblings for layer in group]


def _role(inner: str, parent: nn.Module) -> str:
    """What a linear module does, told by the names between its layer and itself ("self_attn.q_proj")."""
    segments = inner.split(".")
    if _ROUTER.match(segments[-1]) and len(segments) > 1 and _MLP.search(".".join(segments[:-1])):
        return "router"
    if _ROUTER_CLASS.search(type(parent).__name__) or any(segment == "router" for segment in segments):
        return "router"
    if any(_NOT_ADAPTED.search(segment) for segment in segments[:-1]):
        return "other"
    path = segments[:-1] or segments
    if any(_ATTENTION.search(segment) for segment in path):
        return "attn"
    if any(_MLP.search(segment) for segment in segments) or any(re.search(r"^w\d$|^fc", s) for s in segments):
        return "mlp"
    return "other"


def _final_norm(decoder: nn.Module, names: dict[int, str]) -> str | None:
    """The first norm declared after the layers; where there is none, the last one before them."""
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    for child in decoder.children():
        if isinstance(child, nn.ModuleList):
            before, after = before + after, []
            continue
        found = [m for m in (child, *child.children()) if re.search("norm", type(m).__name__, re.IGNORECASE)]
        after += [m for m in found if not isinstance(m, nn.ModuleList)]
    chosen = after[:1] or before[-1:]
    return names[id(chosen[0])] if chosen else None


def _is_tied(model: PreTrainedModel, head: str | None, embedding: str) -> bool:
    """Aliased, or (on meta, where nothing is yet) going to be."""
    if head is None:
        return False
    weight, other = f"{head}.weight", f"{embedding}.weight"
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if tied.get(weight) == other or tied.get(other) == weight:
        return True
    left, right = model.get_submodule(head), model.get_submodule(embedding)
    return getattr(left, "weight", None) is getattr(right, "weight", 0)
