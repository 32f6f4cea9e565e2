"""A step of texts that grow side by side in a tenth of the operations, for decoders of the usual form.

The form is Llama's: norm, queries, keys and values, rotary positions, attention, a sum; norm, gated MLP, a sum. Most of
what a step of the modules themselves costs beside its matrix products are some thousand small operations. Here what
shares its input is one product, each row reads the keys that it has and no more, and what all layers need is made once.

Which models are of the form is told from the names of their parts, and `decoding` tries it on a small model of the same
kind: whatever else a layer does (a multiplier, a window, another order) shows in its numbers, and the model's own
modules run instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from luthier.errors import ModelError
from luthier.hf.anatomy import backbone_name
from luthier.hf.decoding.lean_ops import FEW_THREADS, Between, Layer, Places, PlainBetween, attention_by_products
from luthier.hf.decoding.loops import loops_work
from luthier.hf.decoding.slots import Prefix, SlotRows, padded, rounded
from luthier.hf.fast_norm import eps_of


class Products(Protocol):
    """What computes the linear layers of a model in groups that share their input."""

    def rows(self, start: int, size: int) -> None:
        """From now on inputs are of the texts from row `start` on, filled up to `size` rows."""
        ...

    def __call__(self, group: int, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs of the group's layers, one after the other]."""
        ...


class ModuleProducts:
    """`Products` by the layers themselves.

    Args:
        groups: of layers that share their input.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        self._groups = groups

    def rows(self, start: int, size: int) -> None:
        """Nothing of the layers depends on it."""

    def __call__(self, group: int, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs of the group's layers, one after the other]."""
        found = [cast(Tensor, layer(x)) for layer in self._groups[group]]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
READING = 512
"""Rows of the largest product while texts are read."""
_FEWER = tuple(range(32, READING, 32))
_GROUPS = 4
"""Products of a layer: queries, keys and values; output; gate and up; down."""


Attend = Callable[[int, Tensor], Tensor]
"""Number of a layer, its queries, keys and values [n, heads, dim] of tokens -> [n, queries x dim]."""


class LeanRows(SlotRows):
    """`Rows` by one cache for all of them and one loop over the layers.

    Args:
        model: a causal language model; whether this computes the same is `decoding`'s to find out.
        compiled: whether loops of our own may do what is between the products, where they can.

    Attributes:
        groups: the linear layers, in groups that share their input.
        products: what computes them; the layers themselves until someone knows better.

    Raises:
        ModelError: it is not of the form.
    """

    def __init__(self, model: PreTrainedModel, compiled: bool = True) -> None:
        super().__init__(model)
        backbone = getattr(model, backbone_name(model))
        names = {name for name, _ in backbone.named_children()}
        if names != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise ModelError("its backbone has other parts", where="sampling")
        self._embed, self._norm, self._rotary = backbone.embed_tokens, backbone.norm, backbone.rotary_emb
        self._layers: list[Layer] = []
        self.groups: list[tuple[nn.Module, ...]] = []
        for layer in backbone.layers:
            self._take(layer)
        if len({_sizes(layer) for layer in backbone.layers}) > 1:
            raise ModelError("its layers are of several sizes", where="sampling")
        self._dim = int(backbone.layers[0].self_attn.head_dim)
        self._key_heads = _outputs(self.groups[0][1]) // self._dim
        self._query_heads = _outputs(self.groups[0][0]) // self._dim
        self.products: Products = ModuleProducts(self.groups)
        self._blocks: tuple[int, ...] = (READING,)
        self._runs: tuple[Any, ...] = ()  # what the views below are of
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._loops = compiled and _is_silu(self._layers)

    def _take(self, layer: Any) -> None:
        names = {name for name, _ in layer.named_children()}
        if names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            raise ModelError("its layers have other parts", where="sampling")
        attention, mlp = layer.self_attn, layer.mlp
        norms = {name for name, _ in attention.named_children()} - {*_ATTENTION}
        if norms not in (set(), {"q_norm", "k_norm"}) or {name for name, _ in mlp.named_children()} != {
            *_MLP,
            "act_fn",
        }:
            raise ModelError("its attention or MLP has other parts", where="sampling")
        self.groups += [
            tuple(getattr(attention, name) for name in _ATTENTION[:3]),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ]
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        found = Layer(
            layer.input_layernorm, layer.post_attention_layernorm, q_norm, k_norm, mlp.act_fn, float(attention.scaling)
        )
        for norm in (found.before, found.after, *(() if q_norm is None else (q_norm, k_norm)), self._norm):
            if [name for name, _ in norm.named_parameters()] != ["weight"] or eps_of(norm) is None:
                raise ModelError("its norms are of another kind", where="sampling")
        self._layers.append(found)

    def like(self) -> LeanRows:
        """Empty rows of the same model."""
        rows = LeanRows(self._model, self._loops)
        rows.products = self.products
        return rows

    def settle(self, most: int) -> None:
        super().settle(most)
        # which products of fewer rows give the bits of the largest
        self._blocks = ()
        device, dtype = self._model.device, self._norm.weight.dtype
        generator = torch.Generator().manual_seed(0)
        for number, group in enumerate(self.groups[:_GROUPS]):
            inputs = cast(Tensor, group[0].weight).shape[1]
            x = torch.randn(READING, inputs, generator=generator).to(device, dtype)
            whole = self.products(number, x)
            same = {size for size in _FEWER if torch.equal(self.products(number, x[-size:]), whole[-size:])}
            self._blocks = tuple(size for size in _FEWER if size in same and (not number or size in self._blocks))
        self._blocks += (READING,)

    def read(self, tokens: Sequence[int]) -> Prefix:
        return self._read([tokens], len(tokens))[0]

    def read_together(self, texts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run the model over whole texts at once; none's answer depends on the others. After `settle`.

        Args:
            texts: of `READING` tokens in all, or a single one of more.
        """
        return self._read(texts, self._filled(sum(map(len, texts))))

    def _filled(self, length: int) -> int:
        """Rows that products of so many rows are filled up to: the last of each `READING` to a size that was tried."""
        rest = length % READING
        return length - rest + (next(size for size in self._blocks if size >= rest) if rest else 0)

    def _read(self, texts: Sequence[Sequence[int]], size: int) -> list[Prefix]:
        device = self._model.device
        ends = list(itertools.accumulate(map(len, texts)))
        parts = [slice(end - len(text), end) for text, end in zip(texts, ends, strict=True)]
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=device)
        positions = torch.cat([torch.arange(len(text), device=device) for text in texts])
        kept: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in texts]
        found = torch.zeros(size, self._query_heads * self._dim, dtype=self._norm.weight.dtype, device=device)
        grouped = self._query_heads != self._key_heads

        def attend(number: int, made: Tensor) -> Tensor:
            scale = self._layers[number].scaling
            for part, state in zip(parts, kept, strict=True):
                q, k, v = (tensor.transpose(0, 1)[None] for tensor in self._split(made[part]))
                state[number] = (k, v)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
                found[part] = out[0].transpose(0, 1).flatten(1)
            return found

        hidden = self._run(padded(ids, size), padded(positions, size), attend)
        return [Prefix(tuple(text), hidden[part], state) for text, part, state in zip(texts, parts, kept, strict=True)]

    def _advance(self, start: int, tokens: Sequence[int], size: int) -> Tensor:
        device, count = self._model.device, len(tokens)
        self._make_room(start + size, 0)
        lengths = self._lengths[start : start + count]
        self._make_room(start + size, max(lengths) + 1)
        positions = torch.tensor(lengths, device=device)
        ids = torch.tensor([*tokens, *[0] * (size - count)], dtype=torch.int64, device=device)
        self.products.rows(start, size)
        make = self._compiled_attention if self._compiles() else self._plain_attention
        hidden = self._run(ids, padded(positions, size), make(start, positions, size))
        for row in range(start, start + count):
            self._lengths[row] += 1
        return hidden[:count]

    def _plain_attention(self, start: int, positions: Tensor, size: int) -> Attend:
        """Attention of rows from `start` on, their tokens at `positions`, of neighbours of one length at a time."""
        count, slots, device, dtype = len(positions), self._slots, positions.device, self._norm.weight.dtype
        runs = _runs([rounded(length + 1) for length in self._lengths[start : start + count]])
        longest = max(length for _, _, length in runs)
        unseen = torch.arange(longest, device=device) > positions[:, None]
        mask = torch.zeros(count, longest, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))
        heads = torch.arange(self._key_heads, device=device)
        rows = torch.arange(start, start + count, device=device)
        # places in an arena seen as [rows x heads x places, dim]
        places = ((rows[:, None] * self._key_heads + heads) * slots.places + positions[:, None]).flatten()
        together = self._query_heads // self._key_heads
        # a key head's queries as rows of one product are faster in fp32, and in bf16 where products have no tiles
        by_products = dtype == torch.bfloat16 and device.type == "cpu" and not torch.cpu._is_amx_tile_supported()
        grouped = dtype == torch.float32 or by_products
        seen = [mask[first:end, None, None, :length] for first, end, length in runs]
        if grouped:
            seen = [part.expand(-1, 1, together, -1) for part in seen]
        if self._runs != (key := (slots.rows, slots.places, start, *runs)):
            self._runs, self._views = key, {}
        rest = [torch.zeros(size - count, self._query_heads * self._dim, dtype=dtype, device=device)][: size - count]

        def attend(number: int, made: Tensor) -> Tensor:
            query, *new = self._split(made)
            for arena, tensor in zip(self._arenas(number, made), new, strict=True):
                arena.view(-1, self._dim).index_copy_(0, places, tensor[:count].reshape(-1, self._dim))
            if number not in self._views or self._views[number][0][0].dtype != made.dtype:
                keys, values = slots.keys[number], slots.values[number]
                parts = [(slice(start + first, start + end), slice(None), slice(length)) for first, end, length in runs]
                self._views[number] = [(keys[part], values[part]) for part in parts]
            found, scale = [], self._layers[number].scaling
            for (first, end, _), (keys, values), part in zip(runs, self._views[number], seen, strict=True):
                q = query[first:end]
                q = q.reshape(len(q), self._key_heads, together, self._dim) if grouped else q[:, :, None]
                if by_products:
                    out = attention_by_products(q, keys, values, part, scale)
                else:
                    wide = not grouped and together > 1
                    out = F.scaled_dot_product_attention(q, keys, values, part, scale=scale, enable_gqa=wide)
                found.append(out.reshape(end - first, -1))
            found += rest
            return found[0] if len(found) == 1 else torch.cat(found)

        return attend

    def _compiled_attention(self, start: int, positions: Tensor, size: int) -> Attend:
        """The same in one compiled loop."""
        from luthier.hf.decoding.lean_cpu import Attention

        attention = Attention(start, positions, self._query_heads, size)
        return lambda number, made: attention(made, *self._arenas(number, made), self._layers[number].scaling)

    def _arenas(self, number: int, made: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, places, dim] of a layer."""
        slots = self._slots
        if number not in slots.values or slots.values[number].dtype != made.dtype:
            like = made[None, :, : self._key_heads].transpose(1, 2)
            return slots.arena(slots.keys, number, like), slots.arena(slots.values, number, like)
        return slots.keys[number], slots.values[number]

    def _split(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, heads, dim]."""
        query, key, value = made.split((self._query_heads, self._key_heads, self._key_heads), 1)
        return query, key, value

    def _compiles(self) -> bool:
        """Whether loops of our own do what is between the products; of more threads PyTorch's use all."""
        own = (self._embed.weight, self._norm.weight, self._layers[0].before.weight)
        plain = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in own)
        few = torch.get_num_threads() <= FEW_THREADS and not torch.is_autocast_enabled("cpu")
        return self._loops and plain and few and loops_work()

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [n, hidden] of tokens [n] at positions [n]."""
        products, count = self._product, len(ids)
        x = cast(Tensor, self._embed(ids[None]))[0]
        cos, sin = (table[0] for table in self._rotary(x[None], position_ids=positions[None]))
        between = self._between(Places(cos, sin, self._query_heads, self._key_heads))
        y = between.normed(self._layers[0].before, x)
        for number, layer in enumerate(self._layers):
            made = products(_GROUPS * number, y).view(count, -1, self._dim)
            between.turned(layer, made)
            x, y = between.added(x, products(_GROUPS * number + 1, attend(number, made)), layer.after)
            more = products(_GROUPS * number + 3, between.gated(layer, products(_GROUPS * number + 2, y)))
            last = number + 1 == len(self._layers)
            x, y = between.added(x, more, self._norm if last else self._layers[number + 1].before)
        return y

    def _between(self, places: Places) -> Between:
        if not self._compiles():
            return PlainBetween(places)
        from luthier.hf.decoding.lean_cpu import CompiledBetween

        return CompiledBetween(places)

    def _product(self, group: int, x: Tensor) -> Tensor:
        if x.shape[0] <= READING:
            return self.products(group, x)
        return torch.cat([self.products(group, part) for part in x.split(READING)])


def _runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, length) of neighbours of one length."""
    runs: list[tuple[int, int, int]] = []
    for row, length in enumerate(lengths):
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], row + 1, length)
        else:
            runs.append((row, row + 1, length))
    return runs


def _sizes(layer: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    """Shapes of a layer's own weights; adapters beside them may differ."""
    return tuple((name, one.shape) for name, one in layer.named_parameters() if ".lora_" not in name)


def _outputs(layer: nn.Module) -> int:
    return int(cast(Tensor, layer.weight).shape[0])


def _is_silu(layers: Sequence[Layer]) -> bool:
    probe = torch.linspace(-8, 8, 33)
    return all(torch.equal(layer.activation(probe), F.silu(probe)) for layer in layers)
