"""The attention "luthier": exact causal attention within each document of a packed row, for any architecture.

Transformers looks an attention up by the name in `config._attn_implementation`, and its mask function under the same
name; both are registered here, so padding, sliding windows and packing cannot get lost between the two. Three ways:

- no documents (generation with a cache, padded evaluation): exactly Transformers' own `sdpa`, or the model's own
  `eager` where the model or the call needs it (soft caps, attention sinks);
- documents and plain causal softmax on the CPU: `blocked_attention`;
- documents and anything else: the model's own function, one call a document.

Where several ranks hold a row, `shared_row.py` brings together what one of these three needs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from luthier.errors import ModelError
from luthier.hf.kinds import crosses, sees
from luthier.hf.rows.blocked_attention import blocked_attention
from luthier.hf.rows.documents import Documents, active_documents, documents_of, is_channel
from luthier.hf.rows.shared_row import Piece, attend_shared
from luthier.hf.rows.virtual import BESIDE, PREFIX, with_prefix

NAME = "luthier"
"""The name to give as `attn_implementation`."""

_BLOCKED_DTYPES = (torch.bfloat16, torch.float32)
"""float64 is for proofs: there the model's own attention runs, since models whose norms round to fp32 inside make
1e-6 of a difference in the last bit."""

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def register_attention() -> str:
    """Make "luthier" known to Transformers, attention and mask function; may be called again.

    Returns:
        the name to give as `attn_implementation`.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, document_mask)
    return NAME


def takes_attention(cls: type[PreTrainedModel]) -> bool:
    """Whether an architecture looks its attention up by name, so that "luthier" can stand there."""
    return bool(cls._can_set_attn_implementation() and cls._supports_attention_backend)


def parts_attention(config: PreTrainedConfig, name: str | None) -> str | dict[str, str] | None:
    """What to set as a config's attention implementation, so that its text has the one of this name.

    The eyes of a model know no documents: they have torch's. So has text that looks at pictures by cross attention,
    whose masks are not between positions of a row.
    """
    if name != NAME or not sees(config):
        return name
    text = "sdpa" if crosses(config) else name
    return {"": text, **dict.fromkeys(config.sub_configs, "sdpa"), "text_config": text}


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function of "luthier", called by Transformers once for each kind of layer in a forward pass.

    Returns:
        without documents what `sdpa` gets: bool [batch, 1, q, kv] or None;
        with documents the channel if this mask is plainly causal within each of them, else bool [1, 1, T, T].
    """
    packed = active_documents()
    if packed is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            device=device,
            **kwargs,
        )
    if packed.exchange is not None or packed.parents:
        mask_function = _for_the_whole_row(mask_function, packed, device, kwargs)
    if packed.exchange is not None:
        q_length, kv_length = q_length * packed.exchange.degree, kv_length * packed.exchange.degree
    if batch_size != 1 or q_length != packed.tokens or kv_length != packed.tokens:
        raise ModelError(
            f"documents of {packed.tokens} positions in all were given for {batch_size} row(s) of {q_length} queries "
            f"and {kv_length} keys",
            where="attention",
            remedy="pack the documents into one row and run it without a cache",
        )
    if kwargs.get("attention_mask") is None and _is_causal(mask_function, packed, device):
        return packed.channel(device)
    kwargs["allow_is_causal_skip"] = False
    mask = sdpa_mask(
        batch_size=1, q_length=q_length, kv_length=kv_length, mask_function=mask_function, device=device, **kwargs
    )
    assert mask is not None  # the skips are forbidden above
    return packed.attach(mask & packed.meets(device))


def _for_the_whole_row(
    mask_function: Callable[..., torch.Tensor], packed: Documents, device: torch.device | str, kwargs: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    """The same mask for a row of which this rank holds a part, or whose documents share beginnings: asked about places
    within documents, not the row.

    Takes the attention mask out of `kwargs`: it is the one of ones that keeps Transformers from looking for documents
    in such a row (`parallel/context.py`, `hf/forward.py`).
    """
    kwargs["attention_mask"] = None
    if kwargs.get("use_vmap") or not kwargs.pop("allow_is_causal_skip", True):
        what, where, remedy = "the part of the row that one rank holds", "parallel.cp", "set it to 1"
        if packed.parents:
            what, where, remedy = "rows in which no beginning is shared", "method.share_prompt", "set it to false"
        raise ModelError(f"the model adds a mask of its own, made for {what}", where=where, remedy=remedy)
    place = packed.positions(device)  # chunks of attention begin at a document's start, wherever that is in the row

    def whole(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(batch, head, place[query], place[key])

    return whole


def _is_causal(mask_function: Callable[..., torch.Tensor], packed: Documents, device: torch.device | str) -> bool:
    """Whether a mask function is plainly causal within each document.

    Looks at the last query of each document, which a window or chunk would keep from the first keys, at the first,
    which a mask that looks ahead would show later keys, and at each key after a query's own, which the tokens of a
    picture show one another. Cost: 3 T evaluations instead of T x T.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys, firsts, lasts = [], [], []
    for (start, stop), (begin, end) in zip(packed.spans, packed.beginnings, strict=True):
        keys += [torch.arange(begin, end), torch.arange(start, stop)]
        count = stop - start + end - begin
        firsts.append(torch.full((count,), start))
        lasts.append(torch.full((count,), stop - 1))
    key, first, last = (torch.cat(places).to(device) for places in (keys, firsts, lasts))
    all_met = mask_function(zero, zero, last, key)
    met = mask_function(zero, zero, first, key)
    place, index = packed.positions(device), packed.index(device)
    every = torch.arange(packed.tokens, device=device)
    ahead = mask_function(zero, zero, every[:-1], every[1:]) & (index[:-1] == index[1:])
    return bool((all_met.all() & (met == (place[key] <= place[first])).all() & ~ahead.any()).item())


@torch.compiler.disable  # looks at documents and architectures on the host; a compiled layer is cut here
def attention(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The attention function of "luthier", called by every attention layer; arguments and result are `attend`'s.

    Adds what an adapter beside attention makes of the queries.
    """
    output, weights = attend(module, query, *args, **kwargs)
    beside: Any = module._modules.get(BESIDE)
    if beside is not None and beside.virtual.on:
        output = output + beside(module, query)
    return output, weights


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention within each document, or without documents as Transformers' own.

    Args:
        module: the layer's attention module; tells which architecture's own function is the fallback.
        query: [batch, heads, q, head_dim].
        key: [batch, kv_heads, kv, head_dim].
        value: [batch, kv_heads, kv, value_dim].
        attention_mask: what `document_mask` returned.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None = head_dim ** -0.5.

    Returns:
        [batch, q, heads, value_dim] and, from an eager function, the weights.
    """
    packed = documents_of(attention_mask)
    if packed is None and active_documents() is not None:
        raise ModelError(
            f"{type(module).__name__} did not hand on the mask that keeps packed documents apart",
            where="attention",
            remedy="switch packing off (data.packing: false)",
        )
    own = own_attention(module, kwargs)
    prefix: Any = module._modules.get(PREFIX)
    if prefix is not None and prefix.virtual.on:
        options = {**kwargs, "dropout": dropout, "scaling": scaling}
        return _behind_prefix(own, packed, prefix, module, query, key, value, attention_mask, options)
    if packed is None:
        if own is not sdpa_attention_forward:
            attention_mask = _additive(attention_mask, query, key)
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if query.shape[2] != packed.held or key.shape[2] != packed.held:
        raise ModelError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions in a packed row of "
            f"{packed.held}",
            where="attention",
            remedy="switch packing off (data.packing: false)",
        )
    mask = None if is_channel(attention_mask) else attention_mask
    options = {**kwargs, "dropout": dropout, "scaling": scaling}
    run = functools.partial(_whole_row, own, packed)
    if packed.exchange is None:
        return run(module, query, key, value, mask, options, None)
    return attend_shared(run, packed, packed.exchange, module, query, key, value, mask, options), None


def _behind_prefix(
    own: Attention,
    packed: Documents | None,
    prefix: torch.nn.Module,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a packed row each of whose documents also meets keys and values that stand before it.

    Shapes are those of `attend`; the mask is the channel.
    """
    if packed is None or packed.exchange is not None or not is_channel(mask) or "position_bias" in options:
        what = f"{type(module).__name__} does more than attend to all that is before, which a prefix cannot stand in"
        raise ModelError(what, where="attention", remedy="take another kind of adapter")
    keys, values = with_prefix(prefix, key, value, packed.spans)
    count = (keys.shape[2] - key.shape[2]) // len(packed.spans)
    pieces = [
        Piece(slice(start, stop), slice(start, stop), slice(start + count * number, stop + count * (number + 1)))
        for number, (start, stop) in enumerate(packed.spans)
    ]
    return _whole_row(own, packed, module, query, keys, values, None, options, pieces)


def _whole_row(
    own: Attention,
    packed: Documents,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    pieces: Sequence[Piece] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention where keys and values of the whole row are at hand.

    Args:
        own: the model's own attention function.
        packed: the documents.
        module: the attention module.
        query: [1, heads, T, head_dim], or with `pieces` what these name.
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, value_dim].
        mask: bool [1, 1, T, T], or None where it is causal within each document.
        options: keyword arguments of the attention function.
        pieces: which queries meet which keys; all queries of each document when left out.
    """
    plain = own is sdpa_attention_forward and mask is None and not options["dropout"]
    plain = plain and pieces is None and options.get("position_bias") is None
    if plain and query.device.type == "cpu" and query.dtype in _BLOCKED_DTYPES:
        scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        return blocked_attention(query, key, value, packed, scale), None
    options = dict(options)
    bias = options.pop("position_bias", None)
    if packed.parents:
        if bias is not None:
            what = f"{type(module).__name__} has a bias by places in the row, and documents here share their beginning"
            raise ModelError(what, where="method.share_prompt", remedy="set it to false")
        return _from_beginnings(own, packed, module, query, key, value, mask, options), None
    if pieces is None:
        pieces = [Piece(slice(*span), slice(*span), slice(*span)) for span in packed.spans]
    outputs = []
    for piece in pieces:
        q, k, v = query[:, :, piece.queries], key[:, :, piece.keys], value[:, :, piece.keys]
        m = None if mask is None else mask[:, :, piece.rows, piece.keys]
        if own is not sdpa_attention_forward:
            m = _additive(m, q, k)
        elif m is None and q.shape[2] != k.shape[2]:
            m = _causal(q, k)  # sdpa would let the first query meet the first key
        extra = {} if bias is None else {"position_bias": bias[:, :, piece.rows, piece.keys]}
        outputs.append(own(module, q, k, v, m, **extra, **options)[0])
    return torch.cat(outputs, dim=1), None


def _from_beginnings(
    own: Attention,
    packed: Documents,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """[1, T, heads, value_dim]: each document's queries meet the keys of what it goes on from, and its own."""
    outputs = []
    for (start, stop), (begin, end) in zip(packed.spans, packed.beginnings, strict=True):
        q = query[:, :, start:stop]
        k, v = (torch.cat([t[:, :, begin:end], t[:, :, start:stop]], 2) for t in (key, value))
        m = None
        if mask is not None:
            m = torch.cat([mask[:, :, start:stop, begin:end], mask[:, :, start:stop, start:stop]], 3)
        if own is not sdpa_attention_forward:
            m = _additive(m, q, k)
        elif m is None and end > begin:
            m = _causal(q, k)
        outputs.append(own(module, q, k, v, m, **options)[0])
    return torch.cat(outputs, dim=1)


def own_attention(module: torch.nn.Module, kwargs: dict[str, Any]) -> Attention:
    """Transformers' `sdpa`, or the architecture's own `eager_attention_forward` where `sdpa` cannot do it."""
    config: Any = type(getattr(module, "config", None))
    eager, supports_sdpa = _architecture(cast(Any, type(module)), config)
    if eager is None:
        return sdpa_attention_forward
    if not supports_sdpa or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return eager
    return sdpa_attention_forward


@functools.cache
def _architecture(cls: type, config: type) -> tuple[Attention | None, bool]:
    """(eager attention, whether its models support sdpa) of the modelling file that an attention class comes from.

    Of several models in a file (a text model and its ears) those with the attention's config count.
    """
    for base in cls.__mro__:  # wrappers such as FSDP put a class of their own in front
        source = sys.modules.get(base.__module__)
        eager = getattr(source, "eager_attention_forward", None)
        if eager is not None:
            models = [m for m in vars(source).values() if isinstance(m, type) and issubclass(m, PreTrainedModel)]
            here = [m for m in models if m.__module__ == base.__module__]
            own = [m for m in here if getattr(m, "config_class", None) is config] or here
            return eager, all(m._supports_sdpa for m in own)
    return None, True


def _additive(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Bool mask or None (= causal) as eager functions want it: 0 or the most negative number, [batch, 1, q, kv]."""
    if mask is None:
        mask = _causal(query, key)
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """bool [1, 1, q, kv]: the last query meets all keys, each one before it one less."""
    q, kv = query.shape[2], key.shape[2]
    return torch.ones(q, kv, dtype=torch.bool, device=query.device).tril(kv - q)[None, None]
