"""One stage of a model: some of its layers run, and whatever is not there is stood in for.

Nothing is removed. A layer of another stage is a pass-through in its place, so indices, `config.layer_types[i]` and the
keys of checkpoints stay what they are. The stage's own layers are run by the model's own forward, on its own tokens,
masks and positions; what it makes of them before the layers is zeros on a later stage, and the pass-through just before
the first own layer answers with the hidden states that were received. So nothing that is done to an embedding is done
twice, and what comes after the last own layer never reaches the stage's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from luthier.batch import Batch
from luthier.hf.anatomy import describe
from luthier.hf.forward import hidden_states
from luthier.parallel.balance import Part

TOKENS, WIDTH = -1, -2
"""In a shape: as many as the row has positions, and the size of hidden states."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Which modules with weights of their own run when.

    Attributes:
        before: run before the layers (embeddings, norms of them).
        layers: run one after another, in this order.
        after: run after the layers, or not at all by the backbone (final norm, head).
        outputs: how many values a layer returns in a tuple; 0 where it returns the hidden states themselves.
        dtype: of the hidden states between layers.
        shape: of them; some architectures hand on several streams.
    """

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (1, TOKENS, WIDTH)

    def shape_of(self, tokens: int, width: int) -> tuple[int, ...]:
        """Shape of hidden states of so many positions."""
        return tuple({TOKENS: tokens, WIDTH: width}.get(size, size) for size in self.shape)

    def of(self, part: Part) -> tuple[str, ...]:
        """Names of the modules whose weights a stage has."""
        before = self.before if part.is_first else ()
        after = self.after if part.is_last else ()
        return (*before, *self.layers[part.start : part.stop], *after)


class PassThrough(nn.Module):
    """Returns the hidden states it is given, as the layer in whose place it stands would return its own.

    Args:
        layer: whose plain attributes (`attention_type` and the like) a model's forward may ask for.
        outputs: as `Roles.outputs`.
    """

    def __init__(self, layer: nn.Module | None = None, outputs: int = 0) -> None:
        super().__init__()
        self.outputs = outputs
        for name, value in (vars(layer) if layer is not None else {}).items():
            plain = value is None or isinstance(value, str | int | float | bool | tuple)
            if plain and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = (
            args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))
        )
        return self.answer(hidden)

    def answer(self, hidden: torch.Tensor) -> Any:
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden


class _Entry(PassThrough):
    """Stands before the first own layer: answers with what was received, whatever has been computed here."""

    received: torch.Tensor

    def __init__(self, layer: nn.Module, outputs: int, received: torch.Tensor) -> None:
        super().__init__(layer, outputs)
        object.__setattr__(self, "received", received)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.received.clone())  # some architectures change it in place, which a leaf forbids


class _Exit(PassThrough):
    """Stands after the last own layer: keeps what comes in, which is the stage's output."""

    caught: torch.Tensor

    def answer(self, hidden: torch.Tensor) -> Any:
        object.__setattr__(self, "caught", hidden)
        return super().answer(hidden)


class ZeroEmbedding(nn.Module):
    """Zeros where an embedding, or a matrix after it, would answer for a stage that starts further on.

    Args:
        module: in whose place it stands.
    """

    weight: torch.Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.width = _width(module)
        like = next(module.parameters())
        # what a forward asks an embedding for is its weight's dtype and device
        self.register_buffer("weight", like.new_empty(0, self.width), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        like = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if like is None:
            raise TypeError("an embedding is asked for by a length, not by tokens or positions")
        shape = like.shape[:-1] if like.is_floating_point() else like.shape
        return torch.zeros(*shape, self.width, dtype=self.weight.dtype, device=like.device)


def _width(module: nn.Module) -> int:
    """Size of the last dimension of what a module gives; 0 where that is as its input."""
    for name in ("embedding_dim", "out_features", "nf"):
        if isinstance(width := getattr(module, name, None), int):
            return width
    return 0


def stand_in(name: str, module: nn.Module, roles: Roles) -> nn.Module:
    """What takes the place of a module that a stage does not run."""
    if name in roles.layers:
        return PassThrough(module, roles.outputs)
    if name in roles.before and _width(module):
        return ZeroEmbedding(module)
    return PassThrough()


def remove_others(model: nn.Module, roles: Roles, parts: Iterable[Part]) -> dict[str, nn.Module]:
    """Put stand-ins in the place of all that none of these stages has, in place. Weights shared with it stay.

    Args:
        model: whole, on meta or not.
        roles: of its modules.
        parts: the stages that this process runs.

    Returns:
        a stand-in for every module with weights, which `run` needs.
    """
    owned = {name for part in parts for name in roles.of(part)}
    names = (*roles.before, *roles.layers, *roles.after)
    stand_ins = {name: stand_in(name, model.get_submodule(name), roles) for name in names}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    shared = {owner.rpartition(".")[0] for target, owner in tied.items() if target.rpartition(".")[0] in owned}
    for name, module in stand_ins.items():
        if name not in owned and name not in shared:
            model.set_submodule(name, module)
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for target, owner in list(tied.items()):
        if target not in kept or owner not in kept:
            tied.pop(target)  # there is nothing to tie here
    return stand_ins


def copies(model: nn.Module, roles: Roles, parts: Iterable[Part]) -> frozenset[str]:
    """Names of weights that this process has beside their owner: the embedding's where its head is tied to it.

    Args:
        model: after `remove_others`.
        roles: of the whole model.
        parts: the stages that this process runs.
    """
    owned = {name for part in parts for name in roles.of(part)}
    spare = [name for name in (*roles.before, *roles.layers, *roles.after) if name not in owned]
    found = set()
    for name in spare:
        found |= {f"{name}.{inner}" for inner, _ in model.get_submodule(name).named_parameters()}
    return frozenset(found)


def run(
    model: Any,
    roles: Roles,
    part: Part,
    stand_ins: dict[str, nn.Module],
    batch: Batch,
    received: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one stage's layers on a batch.

    Args:
        model: which has this stage's modules; other stages' may be there too.
        roles: of its modules.
        part: the stage.
        stand_ins: as `remove_others` returned them.
        batch: T positions, the same on every stage.
        received: hidden states from the stage before; None on the first.

    Returns:
        what the next stage receives, or the backbone's hidden states [T, hidden] on the last.
    """
    owned = set(roles.of(part))
    replaced = {name: module for name, module in stand_ins.items() if name not in owned}
    if not part.is_first:
        assert received is not None
        before = roles.layers[part.start - 1]
        replaced[before] = _Entry(stand_ins[before], roles.outputs, received)
    last = None
    if not part.is_last:
        behind = roles.layers[part.stop]
        last = replaced[behind] = _Exit(stand_ins[behind], roles.outputs)
    with _with(model, replaced):
        hidden = hidden_states(model, batch)
    return hidden if last is None else last.caught


@contextmanager
def _with(model: nn.Module, replaced: dict[str, nn.Module]) -> Iterator[None]:
    """Meanwhile other modules stand in the place of some. Names and weights are as before when this is over."""
    there: list[tuple[nn.Module, str, nn.Module | None]] = []
    try:
        for name, module in replaced.items():
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            there.append((owner, child, owner._modules[child]))
            owner._modules[child] = module
        yield
    finally:
        for owner, child, own in there:
            owner._modules[child] = own


def costs(model: Any, roles: Roles) -> tuple[list[float], float]:
    """What a token costs in each layer, and after them, in weights that it is multiplied by.

    An embedding is looked up, which costs nothing beside a matrix product. Of experts only those count that a token is
    sent to.

    Args:
        model: whole, on meta or not.
        roles: of its modules.
    """
    experts = set(describe(model).experts)
    config = model.config.get_text_config()
    chosen = next((n for n in (getattr(config, name, None) for name in _CHOSEN) if isinstance(n, int)), 1)

    def cost(name: str) -> float:
        total = 0.0
        for inner, module in model.get_submodule(name).named_modules():
            share = 1.0
            for parameter in module.parameters(recurse=False):
                if f"{name}.{inner}" in experts and parameter.dim() == 3:
                    share = min(1.0, chosen / parameter.shape[0])
                total += parameter.numel() * share
        return total

    return [cost(name) for name in roles.layers], sum(cost(name) for name in roles.after)


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
"""Names under which configs say how many experts see a token."""
