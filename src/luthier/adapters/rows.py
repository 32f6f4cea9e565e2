"""Rows of single tokens that train: new tokens, and old ones that are to mean something else.

The table of tokens stays as it is, frozen. Beside it stand the rows of the chosen tokens, which take the place of the
table's own wherever such a token is read, and in the head wherever its logit is made. Only they have gradients and
moments, and only they are saved, in PEFT's format (`trainable_token_indices`). A head that is tied to the table follows
with the same rows; one of its own has rows of its own.

A token beyond the end of the table has a row here and nowhere else: the table grows only in an export, so checkpoints
fit the model as they are, and each rank reads its part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.shards import fill

WHERE = "adapter.new_tokens"
CHILD = "token_adapter"
DELTA = "trainable_tokens_delta"
SUFFIX = f".{CHILD}.{DELTA}"
"""Ending of the full name of rows, here and in PEFT's files."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Whose rows train.

    Attributes:
        ids: of the tokens, ascending.
        fresh: those that the tokenizer did not have before; their rows begin as the mean of the table's.
        head: a head that is not tied to the table has rows of its own.
    """

    ids: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    head: bool = True


def add_tokens(tokenizer: Any, names: Sequence[str]) -> NewTokens:
    """Let a tokenizer know tokens, each of which then is one id wherever it stands in a text.

    Args:
        tokenizer: of Transformers; those it lacks are added behind its last one, in the order given.
        names: texts of tokens, or tokens as its vocabulary has them.

    Raises:
        ConfigError: a name is empty, or is there twice.
    """
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError("a token is empty, or named twice", where=WHERE)
    known = tokenizer.get_vocab()
    missing = [name for name in names if name not in known]
    if missing:
        tokenizer.add_tokens(missing)
    ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in names}
    return NewTokens(tuple(sorted(ids.values())), tuple(sorted(ids[name] for name in missing)))


class TokenRows(nn.Module):
    """Rows that stand for those of some tokens; it holds weights, and the table or head that it is in computes.

    Attributes:
        trainable_tokens_delta: [tokens, width], the rows themselves; the name is PEFT's.
        ids: of the tokens, ascending.
        fresh: those that begin as the mean.
        base: tokens that the table has by itself.
        first: [tokens, width], the rows before the first step.
        on: off where the model is to be its base.
    """

    trainable_tokens_delta: nn.Parameter

    def __init__(self, tokens: NewTokens, base: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.trainable_tokens_delta = nn.Parameter(torch.empty(len(tokens.ids), width, device=device, dtype=dtype))
        self.ids, self.fresh, self.base = tokens.ids, tokens.fresh, base
        self.first: Tensor | None = None
        self.on = True

    @property
    def extra(self) -> int:
        """How many of them are beyond the end of the table."""
        return sum(token >= self.base for token in self.ids)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The rows, as plain numbers in the dtype of the table."""
        if not self.on:
            assert self.first is not None, "the rows have not been given first values"
            return self.first.to(dtype)
        delta: Tensor = self.trainable_tokens_delta
        if isinstance(delta, DTensor):  # on ranks of tp: whole on each
            delta = delta.to_local()
        return delta.to(dtype)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.trainable_tokens_delta.shape)


class RowsHead(nn.Module):
    """What a head becomes in addition to itself; always the first base of a class that `attach_rows` makes.

    Attributes:
        token_adapter: the rows of its matrix that train.
        vocabulary_start: the first token that this rank has logits for; 0 where it has all.
    """

    token_adapter: TokenRows
    vocabulary_start: int

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., vocabulary], or this rank's part of it."""
        base = cast(Any, self)
        own = self.token_adapter
        logits: Tensor = super().forward(x)
        found = F.linear(x, own.rows(base.weight.dtype))
        start, stop = self.vocabulary_start, self.vocabulary_start + logits.shape[-1]
        inside = [number for number, token in enumerate(own.ids) if start <= token < min(stop, own.base)]
        if inside:
            places = torch.tensor([own.ids[number] - start for number in inside], device=x.device)
            taken = found[..., torch.tensor(inside, device=x.device)]
            if base.bias is not None:
                taken = taken + base.bias[places]
            logits = logits.index_copy(-1, places, taken)
        if own.extra and stop == own.base:
            logits = torch.cat([logits, found[..., -own.extra :]], -1)
        elif not inside:
            logits = logits + 0 * found.sum()  # every rank has a part of the rows' gradient, if it is nothing
        return logits


_CLASSES: dict[type, type[nn.Module]] = {}
"""Class of the head -> class of the head with rows."""


def _before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the ids, and let the table look up one that it has wherever it has none."""
    ids: Tensor = args[0]
    vars(module)["rows_asked"] = ids
    own = cast(TokenRows, module.token_adapter)
    return (torch.where(ids < own.base, ids, 0), *args[1:]) if own.extra else args


def _after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Put the rows that train in the places of the table's own, scaled and all as the table does it."""
    ids: Tensor = vars(module).pop("rows_asked")
    own = cast(TokenRows, module.token_adapter)
    known = torch.tensor(own.ids, device=ids.device)
    place = torch.searchsorted(known, ids).clamp(max=len(own.ids) - 1)
    here = known[place] == ids
    table = cast(Any, module)
    weight, padding = table._parameters["weight"], table.padding_idx
    table._parameters["weight"] = own.rows(weight.dtype)
    table.padding_idx = own.ids.index(padding) if padding in own.ids else None
    try:
        found = type(table).forward(table, torch.where(here, place, 0))
    finally:
        table._parameters["weight"], table.padding_idx = weight, padding
    return torch.where(here[..., None], found.to(output.dtype), output)


def attach_rows(model: Any, tokens: NewTokens, dtype: torch.dtype | None = None, trained: Sequence[str] = ()) -> None:
    """Let the rows of some tokens train, in the table and in the head; they are left uninitialised.

    Args:
        model: a Transformers model, on meta or real.
        tokens: whose rows. Those beyond the end of the table must follow it without a gap.
        dtype: of the rows; the table's when left out.
        trained: full names of modules that are trained whole.

    Raises:
        ConfigError: the model's table or head is not of the kind, or is adapted otherwise.
    """
    anatomy = describe(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    _require_possible(model, tokens, trained)
    base, width = table.weight.shape
    how: dict[str, Any] = {"device": table.weight.device, "dtype": dtype or table.weight.dtype}
    table.token_adapter = TokenRows(tokens, base, width, **how)
    table.register_forward_pre_hook(_before)
    table.register_forward_hook(_after)
    table.vocabulary = base + table.token_adapter.extra
    model.config.get_text_config().vocab_size = table.vocabulary
    refused = {**getattr(model, "refused_layouts", {}), "pp": "rows of single tokens are not dealt to stages"}
    model.refused_layouts = refused
    if not anatomy.tied and not tokens.head:
        return
    head.token_adapter = TokenRows(tokens, base, width, **how)
    if anatomy.tied:
        model.all_tied_weights_keys[f"{anatomy.head}{SUFFIX}"] = f"{anatomy.embedding}{SUFFIX}"
        if not table.weight.is_meta:
            head.token_adapter.trainable_tokens_delta = table.token_adapter.trainable_tokens_delta
    kind = type(head)
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Rows{kind.__name__}", (RowsHead, kind), {"__module__": __name__})
    head.__class__ = _CLASSES[kind]
    head.vocabulary_start = 0


def _require_possible(model: Any, tokens: NewTokens, trained: Sequence[str]) -> None:
    anatomy = describe(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear) or table.max_norm is not None:
        raise ConfigError(f"{name} has no plain table of tokens with a linear head", where=WHERE)
    if head.weight.shape != table.weight.shape:
        raise ConfigError(f"the head of {name} is of another shape than its table of tokens", where=WHERE)
    if head.bias is not None:
        what = f"the head of {name} has a bias, which PEFT leaves out beside rows that train"
        raise ConfigError(what, where=WHERE, remedy="train the embedding and the head whole (adapter.train_modules)")
    ends = (anatomy.embedding, anatomy.head)
    if any(f"{end}.".startswith(f"{whole}.") for end in ends for whole in trained):
        raise ConfigError("the table of tokens is trained whole", where=WHERE, remedy="leave one of the two out")
    if any(parameter is not table.weight for module in (table, head) for parameter in module.parameters()) and any(
        hasattr(module, part) for module in (table, head) for part in ("lora_A", "lora_embedding_A")
    ):
        remedy = "leave the embedding and the head out of adapter.target"
        raise ConfigError("the table of tokens or the head carries LoRA", where=WHERE, remedy=remedy)
    base = len(table.weight)
    extra = [token for token in tokens.ids if token >= base]
    if extra and not anatomy.tied and not tokens.head:
        raise ConfigError("tokens that only the embedding has a row for have no logit", where=WHERE)
    if extra != list(range(base, base + len(extra))):
        what = f"the tokenizer has tokens beyond the model's {base:,} that are not named"
        raise ConfigError(what, where=WHERE, remedy="name them too")
    others = [
        key
        for key, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not table and module.num_embeddings == base
    ]
    if extra and others:
        raise ConfigError(f"{name} has a second table of tokens ({others[0]}), which cannot grow", where=WHERE)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The full value of what may lie in parts; all ranks that share it call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    here = tensor.to_local().device
    # offloaded shards travel through the device that the ranks talk by
    moved = cast(DTensor, tensor.detach().to(tensor.device_mesh.device_type))
    return moved.full_tensor().to(here)


def rows_of(model: nn.Module) -> dict[str, TokenRows]:
    """Full name of the table, and of a head with rows of its own -> the rows; empty where no single rows train."""
    found: dict[str, TokenRows] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = module._modules.get(CHILD)
        if isinstance(own, TokenRows) and id(own.trainable_tokens_delta) not in seen:
            seen.add(id(own.trainable_tokens_delta))
            found[name] = own
    return found


def rows_of_all(model: nn.Module) -> list[TokenRows]:
    """Every place of rows, also of a head that has the table's."""
    return [module for module in model.modules() if isinstance(module, TokenRows)]


@torch.no_grad()
def initialise_rows(model: Any, *, fill_in: bool = True) -> None:
    """First values: an old token's own row; a fresh one's is the mean of the table's (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html), in the head of the head's.

    Args:
        model: the weights in place; on a layout all ranks call it.
        fill_in: let the rows have them; else they are noted alone.
    """
    for name, own in rows_of(model).items():
        weight: Tensor = model.get_submodule(name).weight
        table = whole(weight)
        wide = torch.float64 if table.dtype == torch.float64 else torch.float32
        mean = table.mean(0, dtype=wide)
        fresh = {*own.fresh, *(token for token in own.ids if token >= own.base)}
        first = [mean if token in fresh else table[token].to(wide) for token in own.ids]
        own.first = torch.stack(first).to(own.trainable_tokens_delta.dtype)
        if fill_in:
            fill(own.trainable_tokens_delta, own.first)
    known = rows_of(model)
    for place in rows_of_all(model):
        if place.first is None:  # a tied head's
            place.first = next(iter(known.values())).first


def tie_rows(model: Any) -> None:
    """Let a tied head have the table's very rows; to be called when weights have been given memory."""
    anatomy = describe(model)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, RowsHead) and anatomy.tied:
        head.token_adapter.trainable_tokens_delta = table.token_adapter.trainable_tokens_delta


def detach_rows(model: Any) -> None:
    """Take the rows off; table and head are as they were before."""
    anatomy = describe(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if CHILD not in table._modules:
        return
    model.config.get_text_config().vocab_size = table.token_adapter.base
    for hooks, hook in ((table._forward_pre_hooks, _before), (table._forward_hooks, _after)):
        for key in [key for key, own in hooks.items() if own is hook]:
            del hooks[key]
    del table.token_adapter, table.vocabulary
    if isinstance(head, RowsHead):
        del head.token_adapter, head.vocabulary_start
        head.__class__ = type(head).__mro__[2]
    model.all_tied_weights_keys.pop(f"{anatomy.head}{SUFFIX}", None)
    model.refused_layouts = {key: why for key, why in model.refused_layouts.items() if key != "pp"}


def folded(own: TokenRows, weight: Tensor, rows: Tensor) -> Tensor:
    """The matrix that alone does what a matrix [base, width] and its rows do: [base + extra, width], exactly."""
    whole = torch.cat([weight, weight.new_empty(own.extra, weight.shape[1])]) if own.extra else weight.clone()
    return whole.index_copy_(0, torch.tensor(own.ids, device=weight.device), rows.to(weight.dtype))


@torch.no_grad()
def merge_rows(model: Any) -> int:
    """Fold the rows into table and head, which grow where they must; the model's own modules remain.

    Args:
        model: in one process.

    Returns:
        how many tokens had rows.
    """
    found = rows_of(model)
    if not found:
        return 0
    tied = describe(model).tied
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    made = {
        name: nn.Parameter(folded(own, model.get_submodule(name).weight.detach(), own.trainable_tokens_delta.detach()))
        for name, own in found.items()
    }
    count = len(next(iter(found.values())).ids)
    detach_rows(model)
    for name, weight in made.items():
        weight.requires_grad_(model.get_submodule(name).weight.requires_grad)
        model.get_submodule(name).weight = weight
    if tied:
        head.weight = table.weight
    table.num_embeddings = head.out_features = len(table.weight)
    model.config.get_text_config().vocab_size = len(table.weight)
    return count
