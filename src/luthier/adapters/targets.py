"""What `adapter.target` and `adapter.train_modules` mean in a given model: full names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.experts import find_experts
from luthier.hf.linear import linear_shape

ALL_LINEAR = "all-linear"


def resolve_targets(
    model: Any, items: Sequence[str], *, without: Sequence[str] = (), where: str = "adapter.target"
) -> list[str]:
    """The linear layers, and matrices of fused experts, that are to be adapted.

    Args:
        model: a Transformers model, on meta or real.
        items: each a role (attn, mlp with the experts, experts alone, unembed, embed: the table of tokens; of a model
            that sees vision, vision_attn, vision_mlp, projector), all-linear (every linear module of the text's layers
            but routers), the last part of a name or a dotted ending of it (q_proj, mlp.down_proj, experts.down_proj,
            layers.3.self_attn.q_proj), or a regular expression over full names.
        without: full names of modules that are trained whole; nothing in them is adapted.
        where: the field, for messages.

    Returns:
        full names in the model's order, each once.

    Raises:
        ConfigError: an item adapts nothing; it is named, and what the model has.
    """
    anatomy = describe(model)
    experts = {group.name: [f"{group.name}.{key}" for key in group.matrices] for group in find_experts(model)}
    linear: list[str] = []
    for name, module in model.named_modules():
        found = experts.get(name, []) + ([name] if linear_shape(module) or name == anatomy.embedding else [])
        linear += [target for target in found if not _inside(name, without)]
    roles = anatomy.roles | {"experts": tuple(name for names in experts.values() for name in names)}
    roles["mlp"] += roles["experts"]
    roles["embed"] = (anatomy.embedding,)
    chosen: set[str] = set()
    for item in items:
        if item in roles:
            found = [name for name in linear if name in roles[item]]
        elif item == ALL_LINEAR:
            found = [name for name in linear if name in anatomy.all_linear]
        else:
            found = _by_name_or_pattern(item, linear)
        if not found:
            raise _nothing(model, item, linear, roles, bool(without), where)
        chosen.update(found)
    return [name for name in linear if name in chosen]


def resolve_modules(model: nn.Module, items: Sequence[str], *, where: str = "adapter.train_modules") -> list[str]:
    """The modules that are to be trained whole, beside the adapters.

    Args:
        model: a Transformers model, on meta or real.
        items: each the last part of a module's name, a dotted ending of it, or a regular expression over full names.
        where: the field, for messages.

    Returns:
        full names in the model's order, each once, none inside another.

    Raises:
        ConfigError: an item names nothing, or only modules without parameters.
    """
    names = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    chosen: set[str] = set()
    for item in items:
        found = _by_name_or_pattern(item, names)
        if not found:
            close = nearest(item, _endings(names))
            raise ConfigError(
                f"{item!r} names no module with weights in {type(model).__name__}",
                where=where,
                remedy=f"did you mean {close!r}?" if close else "name modules by their last part, as in 'norm'",
            )
        chosen.update(found)
    return [name for name in names if name in chosen and not _inside(name.rpartition(".")[0], chosen)]


def _by_name_or_pattern(item: str, names: Sequence[str]) -> list[str]:
    if found := [name for name in names if name == item or name.endswith(f".{item}")]:
        return found
    try:
        pattern = re.compile(item)
    except re.error:
        return []
    return [name for name in names if pattern.fullmatch(name)]


def _inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of `modules` or lies within one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _endings(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()))


def _nothing(
    model: nn.Module, item: str, linear: Sequence[str], roles: dict[str, tuple[str, ...]], excluded: bool, where: str
) -> ConfigError:
    usable = [role for role, names in roles.items() if any(name in set(linear) for name in names)]
    known = [*usable, ALL_LINEAR, *_endings(linear)]
    others = [name for name, _ in model.named_modules() if name == item or name.endswith(f".{item}")]
    what = f"{item!r} adapts nothing in {type(model).__name__}"
    if excluded and (others or roles.get(item)):
        what += ", since what it names is trained whole (adapter.train_modules)"
    elif others and item not in roles:
        kind = type(model.get_submodule(others[0])).__name__
        what += f": {others[0]} is a {kind}, not a linear layer or the table of tokens"
    close = None if others or item in roles else nearest(item, known)
    remedy = f"did you mean {close!r}?" if close else f"choose from {', '.join(known)}"
    return ConfigError(what, where=where, remedy=remedy)
