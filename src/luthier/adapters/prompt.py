"""What learns in the place of text: virtual tokens, keys and values before every document, prompts beside attention.

Each is a small module in its place in the model, under names of its own; `hf.rows.virtual` says how a forward pass
takes heed of them, so that every document of a packed row has them and no document sees another's. Matrices have two
dimensions and lie with attention's heads first, so a layout cuts them as it cuts the projections of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.rows.virtual import BESIDE, PREFIX, Virtual, set_virtual

TOKENS = "virtual_tokens"
ENCODER = "prompt_encoder"
ADAPTION_PROMPTS = {"llama": "self_attn", "mistral": "self_attn"}
"""Model type -> name of a layer's attention. PEFT knows these, and GPT-2, whose output projection it passes by."""


class VirtualTokens(nn.Module):
    """Embeddings of tokens that no text holds; the table of tokens that it is in looks them up.

    Attributes:
        prompt: [tokens, width].
        first: id of the first.
    """

    prompt: nn.Parameter

    def __init__(self, count: int, first: int, width: int, **how: Any) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(count, width, **how))
        self.first = first


def _before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the ids, and let the table look up one that it has wherever it has none."""
    ids: Tensor = args[0]
    vars(module)["virtual_asked"] = ids
    return torch.where(ids < cast(VirtualTokens, module.virtual_tokens).first, ids, 0), *args[1:]


def _after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Put virtual tokens in their places, as they are: what a table multiplies its rows by is not for them."""
    own = cast(VirtualTokens, module.virtual_tokens)
    places: Tensor = vars(module).pop("virtual_asked") - own.first
    found = F.embedding(places.clamp(min=0), own.prompt.to(output.dtype))
    return torch.where((places >= 0)[..., None], found, output)


class _Given:
    """Keys and values that the encoder has made for a layer; a copy of a model has none."""

    value: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> _Given:
        return _Given()


class LayerPrefix(nn.Module):
    """Keys and values that stand before every document in one layer.

    Attributes:
        keys: [heads x dim, positions]; none where an encoder makes them.
        values: the same.
        virtual: of the model.
    """

    keys: nn.Parameter | None
    values: nn.Parameter | None

    def __init__(self, virtual: Virtual, heads: int, dim: int, *, encoded: bool, **how: Any) -> None:
        super().__init__()
        self.virtual, self.dim, self.heads = virtual, dim, heads
        self.given = _Given()
        shape = (heads * dim, virtual.positions)
        self.keys = None if encoded else nn.Parameter(torch.empty(shape, **how))
        self.values = None if encoded else nn.Parameter(torch.empty(shape, **how))

    def forward(self) -> tuple[Tensor, Tensor]:
        """[1, heads that are here, positions, dim] each."""
        if self.keys is None or self.values is None:
            assert self.given.value is not None, "the encoder has not run"
            return self.given.value
        return self._heads(self.keys), self._heads(self.values)

    def _heads(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(0, (-1, self.dim)).transpose(1, 2)[None]


class PrefixEncoder(nn.Module):
    """The network that prefixes are trained through: embedding, matrix, tanh, matrix; names and form are PEFT's."""

    def __init__(self, positions: int, width: int, hidden: int, layers: int, **how: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(positions, width, **how)
        self.transform = nn.Sequential(
            nn.Linear(width, hidden, **how), nn.Tanh(), nn.Linear(hidden, layers * 2 * width, **how)
        )

    def forward(self) -> Tensor:
        """[positions, layers x 2 x width]: of each layer the keys, then the values."""
        return cast(Tensor, self.transform(self.embedding.weight))


def _encode(model: Any) -> None:
    """Run the encoder and hand every layer its keys and values."""
    layers = [prefix for _, prefix in prefixes_of(model)]
    made: Tensor = model.prompt_encoder()
    for prefix, part in zip(layers, made.chunk(len(layers), 1), strict=True):
        keys, values = part.chunk(2, 1)  # [positions, heads x dim] each
        prefix.given.value = prefix._heads(keys.T), prefix._heads(values.T)


class Adaption(nn.Module):
    """Prompts that one layer's queries attend to beside the text, behind a gate that begins closed.

    Attributes:
        prompt: [prompts, width], read through the layer's own projections of keys and values.
        gate: [1].
        virtual: of the model.
    """

    prompt: nn.Parameter
    gate: nn.Parameter

    def __init__(self, virtual: Virtual, count: int, width: int, **how: Any) -> None:
        super().__init__()
        self.virtual = virtual
        self.prompt = nn.Parameter(torch.empty(count, width, **how))
        self.gate = nn.Parameter(torch.empty(1, **how))

    def forward(self, attention: Any, query: Tensor) -> Tensor:
        """[batch, heads, q, dim] -> [batch, q, heads, dim], added to what attention gives."""
        prompt = self.prompt.to(query.dtype)[None]
        dim = query.shape[-1]
        keys, values = (
            project(prompt).unflatten(-1, (-1, dim)).transpose(1, 2) for project in (attention.k_proj, attention.v_proj)
        )  # [1, kv_heads, prompts, dim]
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
        scores = query @ keys.transpose(2, 3) / math.sqrt(dim)
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = self.gate.to(query.dtype) * F.softmax(scores, -1, dtype=wide).to(query.dtype)
        return (weights @ values).transpose(1, 2)


def attach_tokens(model: Any, count: int, dtype: torch.dtype | None) -> None:
    """Let virtual tokens stand before every document; their embeddings are left uninitialised."""
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ConfigError(f"{type(model).__name__} has no plain table of tokens", where="adapter.kind")
    base, width = table.weight.shape
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not table and module.num_embeddings == base
    ]
    if others:
        what = f"{type(model).__name__} looks tokens up in a second table ({others[0]}), which has no virtual ones"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: lora")
    how = {"device": table.weight.device, "dtype": dtype or table.weight.dtype}
    table.virtual_tokens = VirtualTokens(count, base, width, **how)
    table.register_forward_pre_hook(_before)
    table.register_forward_hook(_after)
    set_virtual(model, Virtual(tokens=count, first=base))


def attach_prefix(model: Any, count: int, dtype: torch.dtype | None, encoder: int | None = None) -> None:
    """Let keys and values stand before every document in every layer; they are left uninitialised.

    Args:
        model: on meta or real.
        count: positions.
        dtype: the table's when left out.
        encoder: width of the network that they are trained through, 0 for the model's own; None for no network.

    Raises:
        ConfigError: its attention is not of the kind.
    """
    heads, dim = key_heads(model)
    virtual = Virtual(positions=count)
    weight = model.get_input_embeddings().weight
    how = {"device": weight.device, "dtype": dtype or weight.dtype}
    modules = attentions(model)
    for module in modules.values():
        setattr(module, PREFIX, LayerPrefix(virtual, heads, dim, encoded=encoder is not None, **how))
    if encoder is not None:
        model.prompt_encoder = PrefixEncoder(count, heads * dim, encoder or heads * dim, len(modules), **how)
        virtual.prepare = _encode
    set_virtual(model, virtual)


def attach_adaption(model: Any, count: int, layers: int | None, dtype: torch.dtype | None) -> None:
    """Let the uppermost layers attend to prompts beside the text; they are left uninitialised.

    Raises:
        ConfigError: PEFT's method does not know the architecture, or there are fewer layers.
    """
    kind = model.config.get_text_config().model_type
    name = type(model).__name__
    if kind not in ADAPTION_PROMPTS:
        what = f"adaption prompts are for {' and '.join(ADAPTION_PROMPTS)} models, and {name} is of type {kind}"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: prefix, or lora")
    found = [model.get_submodule(f"{layer}.{ADAPTION_PROMPTS[kind]}") for layer in describe(model).layers]
    if layers is not None and layers > len(found):
        raise ConfigError(f"{name} has {len(found)} layers", where="adapter.adapter_layers", remedy="ask for fewer")
    width = model.config.hidden_size
    if found[0].o_proj.bias is not None or found[0].q_proj.out_features != width:
        what = f"the attention of {name} ends in a bias, or has another width, which PEFT does not reckon with"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: prefix, or lora")
    virtual = Virtual()
    for module in found[-layers:] if layers is not None else found:
        how = {"device": module.k_proj.weight.device, "dtype": dtype or module.k_proj.weight.dtype}
        setattr(module, BESIDE, Adaption(virtual, count, width, **how))
    set_virtual(model, virtual)


def attentions(model: Any) -> dict[str, nn.Module]:
    """Full name -> attention of every layer.

    Raises:
        ConfigError: a layer has none, or several.
    """
    found: dict[str, nn.Module] = {}
    for layer in describe(model).layers:
        inside = [
            (f"{layer}.{name}", module)
            for name, module in model.get_submodule(layer).named_modules()
            if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
        ]
        if len(inside) != 1:
            what = f"{layer} of {type(model).__name__} has {len(inside)} attention modules, not one"
            raise ConfigError(what, where="adapter.kind", remedy="take kind: lora or prompt")
        found |= dict(inside)
    return found


def key_heads(model: Any) -> tuple[int, int]:
    """How many heads of keys a layer has, and their length, as PEFT reads it off the config.

    Raises:
        ConfigError: layers look back a window, or have other heads than each other.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = getattr(config, "sliding_window", None) and (not kinds or kinds != {"full_attention"})
    if windows or kinds - {"full_attention"} or getattr(config, "kv_lora_rank", None):
        what = f"{type(model).__name__} has layers that do not attend to all that is before them"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: lora or prompt")
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim


def prefixes_of(model: nn.Module) -> Iterator[tuple[str, LayerPrefix]]:
    """Full name of the attention, and its prefix, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(own := module._modules.get(PREFIX), LayerPrefix):
            yield name, own


def adaptions_of(model: nn.Module) -> Iterator[tuple[str, Adaption]]:
    """Full name of the attention, and the prompts beside it, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(own := module._modules.get(BESIDE), Adaption):
            yield name, own


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """Full name -> what learns in the place of text; empty where nothing does."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, VirtualTokens | LayerPrefix | PrefixEncoder | Adaption):
            found |= {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
    return found


def detach_learned(model: Any) -> None:
    """Take it all off; the model is as it was before."""
    table = model.get_input_embeddings()
    for hooks, hook in ((table._forward_pre_hooks, _before), (table._forward_hooks, _after)):
        for key in [key for key, own in hooks.items() if own is hook]:
            del hooks[key]
    for module in list(model.modules()):
        for child in (TOKENS, PREFIX, BESIDE, ENCODER):
            if isinstance(module._modules.get(child), VirtualTokens | LayerPrefix | PrefixEncoder | Adaption):
                delattr(module, child)
    set_virtual(model, None)
