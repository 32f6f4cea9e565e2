"""Which layouts a model can have. What cannot be is refused before weights are read, the nearest that can is named."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any

from luthier.config import OptimizerConfig
from luthier.errors import ConfigError, UserError
from luthier.hf.anatomy import describe
from luthier.hf.kinds import crosses, reads_text_alone, sees
from luthier.optim import eight_bits
from luthier.optim.eight_bits import has_eight_bits
from luthier.optim.optimizer import refused as whole_matrices
from luthier.parallel import context, cuttable, expert, fsdp, tensor
from luthier.parallel.layout import Layout, Refusal

REFUSALS: dict[str, Callable[[Any, int], str | None]] = {
    "tp": tensor.refusal,
    "cp": context.refusal,
    "pp": cuttable.refusal,
    "ep": expert.refusal,
}
"""Degree -> refusal(model, degree): the reason as a clause, or None. Data parallelism cuts any model."""

_NAMES = ("dp_replicate", "dp_shard", *REFUSALS)
_EYES = "what sees has no plan for it"
_LATE = "are put together after the backward pass"
_CROSSING = "text without images passes its layers over that see"


def check_pictures(layout: Layout) -> None:
    """Refuse a layout that rows with pictures cannot be cut for; which models' layouts can be, `check` says.

    Raises:
        ConfigError: with the nearest layout of as many ranks that works.
    """
    for name in REFUSALS:
        if getattr(layout, name) > 1:
            works = nearest(layout, lambda cut, degree: _EYES if cut in REFUSALS and degree > 1 else None)
            what = f"rows with images cannot run on {name} {getattr(layout, name)}: {_EYES}"
            raise ConfigError(what, where=f"parallel.{name}", remedy=f"{works} would work")


def check_in_backward(layout: Layout) -> None:
    """Refuse layouts whose gradients are not whole when a backward pass ends.

    Raises:
        ConfigError: it has tp, cp, pp or ep; names the degrees.
    """
    named = [name for name in REFUSALS if getattr(layout, name) > 1]
    if named:
        raise ConfigError(
            f"gradients under {' and '.join(named)} {_LATE}",
            where="optimizer.in_backward",
            remedy="leave it out, or take dp_shard and dp_replicate alone",
        )


def needs_whole(model: Any, name: str, optimizer: OptimizerConfig) -> UserError | None:
    """What speaks against a degree that shards what an optimizer takes whole: eight-bit moments, and matrices.

    Args:
        model: whole, on meta or not; adapters may be in place.
        name: of the degree. FSDP, which dp_replicate and cp have too, shards all that trains, but for what is kept in
            another dtype than the rest; tp makes parts of all, of which some are whole; pp and ep leave weights alone.
        optimizer: that will train it.
    """
    if name == "tp":
        found = [(key, p, lie.placement.is_shard()) for key, p, lie in tensor.lies(model)]
    elif name in ("dp_replicate", "dp_shard", "cp"):
        apart = {id(p) for p in fsdp.of_other_dtypes(model, next(iter(model.parameters())).dtype)}
        found = [(key, p, True) for key, p in model.named_parameters() if id(p) not in apart]
    else:
        return None
    layers = tuple(f"{layer}." for layer in describe(model).layers)
    for key, parameter, is_cut in found:
        if not parameter.requires_grad:
            continue
        if has_eight_bits(parameter, getattr(optimizer, "state_dtype", "")):
            return eight_bits.refused(key)
        hidden = parameter.ndim == 2 and key.startswith(layers)
        if is_cut and (optimizer.name == "adafactor" or (optimizer.name == "muon" and hidden)):
            return whole_matrices(optimizer.name, key)
    return None


def read_whole(model: Any, name: str) -> ConfigError | None:
    """What speaks against a degree that cuts what an adapter factorises while it is read.

    Args:
        model: whole, on meta or not; adapters may be in place.
        name: of the degree; dp_replicate and pp leave weights whole.
    """
    names = getattr(model, "factorised", ())
    if name == "tp":
        placed = {key: lie.placement for key, _, lie in tensor.lies(model)} if names else {}
        names = [key for key in names if key in placed and placed[key].is_shard()]
    if not names or name not in ("dp_shard", "cp", "tp"):
        return None
    what = f"loftq factorises whole weights, and of {names[0]} each rank reads a part"
    return ConfigError(what, where="adapter.init", remedy="use dp_replicate or pp, or leave init out")


def refusals(
    model: Any, stages_per_rank: int = 1, optimizer: OptimizerConfig | None = None, *, pictures: bool = False
) -> Refusal:
    """Why a model cannot have a degree, asked one by one: what `check` refuses, a search of layouts leaves out.

    Args:
        model: whole, on meta or not; adapters may be in place.
        stages_per_rank: of the pipeline's schedule.
        optimizer: that will train it; None where nothing trains.
        pictures: rows have some.

    Returns:
        reason(name of any degree, degree): a clause, None where it can.
    """
    seeing = sees(model.config)

    @cache
    def reason(name: str, degree: int) -> str | None:
        if degree == 1:
            return None
        if seeing and crosses(model.config):
            return _CROSSING
        if optimizer is not None and (error := needs_whole(model, name, optimizer)) is not None:
            return error.what
        if (error := read_whole(model, name)) is not None:
            return error.what
        if name not in REFUSALS:
            return None
        if optimizer is not None and optimizer.in_backward:
            return f"gradients under {name} {_LATE}"
        if seeing and (pictures or not reads_text_alone(model.config)):
            return _EYES
        why = getattr(model, "refused_layouts", {}).get(name)  # by what is beside the weights
        if why is not None and (said := why(degree) if callable(why) else why):
            return str(said)
        if name == "pp":
            return cuttable.refusal(model, degree, stages_per_rank)
        return REFUSALS[name](model, degree)

    return reason


def check(model: Any, layout: Layout, stages_per_rank: int = 1, optimizer: OptimizerConfig | None = None) -> None:
    """Refuse a layout that the model's mathematics does not admit, or its optimizer's.

    Args:
        model: whole, on meta or not; adapters may be in place.
        layout: asked for.
        stages_per_rank: of the pipeline's schedule.
        optimizer: that will train it; None where nothing trains.

    Raises:
        ConfigError: with the reason, and the nearest layout of as many ranks that works, with the optimizer too,
            or that none does; or the adapter factorises whole weights.
        UserError: the optimizer takes whole weights, of which the layout makes shards.
    """
    if optimizer is not None and optimizer.in_backward:
        check_in_backward(layout)
    reason = refusals(model, stages_per_rank)
    if layout.ranks > 1 and sees(model.config) and crosses(model.config):
        what = f"{type(model).__name__} cannot run on several ranks: {_CROSSING}"
        raise ConfigError(what, where="parallel", remedy="run one process")
    for name in _NAMES:
        if getattr(layout, name) > 1 and (whole := read_whole(model, name)) is not None:
            raise whole
    for name in REFUSALS:
        degree = getattr(layout, name)
        if why := reason(name, degree):
            where, remedy = _instead(model, layout, name, stages_per_rank, optimizer)
            what = f"{type(model).__name__} cannot run on {name} {degree}: {why}"
            raise ConfigError(what, where=f"parallel.{where}", remedy=remedy)
    for name in ("dp_replicate", "dp_shard", "cp", "tp"):
        if optimizer is not None and getattr(layout, name) > 1 and (error := needs_whole(model, name, optimizer)):
            raise error


def _instead(
    model: Any, layout: Layout, name: str, stages_per_rank: int, optimizer: OptimizerConfig | None
) -> tuple[str, str]:
    """The key to change, and to what, where a model cannot have a layout's degree of a name."""
    reason = refusals(model, stages_per_rank, optimizer)
    where, found = name, [str(works)] if (works := nearest(layout, reason)) is not None else []
    if name == "pp" and not any(reason(other, getattr(layout, other)) for other in _NAMES if other != name):
        fewer = _fewer_stages(model, layout.pp, stages_per_rank)
        if fewer is not None:
            where, found = "stages_per_rank", [f"{fewer} of them", *found]
    if found:
        return where, f"{', or '.join(found)}{',' * (len(found) > 1)} would work"
    remedy = f"no layout of {layout.ranks} ranks would work"
    if optimizer is not None and (error := needs_whole(model, "dp_shard", optimizer)) is not None:
        remedy = f"{remedy}, since {error.what}; {error.remedy}"
    return where, remedy


def _fewer_stages(model: Any, degree: int, stages_per_rank: int) -> int | None:
    """How many stages a rank could hold instead, where a schedule that takes any number of them is to hold too many."""
    most = len(describe(model).layers) // degree
    return most if 2 <= most < stages_per_rank and cuttable.refusal(model, degree, most) is None else None


def nearest(layout: Layout, reason: Refusal) -> Layout | None:
    """The layout of as many ranks that is most like this one, of those that nothing speaks against; None without any.

    Args:
        layout: that cannot be.
        reason: why a degree of a name cannot be, or None.

    >>> str(nearest(Layout(dp_shard=3, tp=2), lambda name, degree: "no" if name == "tp" and degree == 2 else None))
    'dp_shard 2 x tp 3'
    """
    found = [
        candidate
        for candidate in _same_ranks(layout)
        if not any(reason(name, getattr(candidate, name)) for name in _NAMES)
    ]

    def unlike(candidate: Layout) -> tuple[bool, float, int]:
        """Copies stay as many as they were where they can."""
        return candidate.dp_replicate != layout.dp_replicate, _distance(candidate, layout), -candidate.dp_shard

    return min(found, key=unlike, default=None)


def _same_ranks(layout: Layout) -> list[Layout]:
    ranks = layout.ranks
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    found = []
    copies = sorted({1, layout.dp_replicate})
    for replicas, cp, tp, pp in itertools.product(copies, divisors, divisors, divisors):
        rest = replicas * cp * tp * pp
        if ranks % rest:
            continue
        for ep in sorted({1, layout.ep}):
            candidate = Layout(replicas, ranks // rest, cp, tp, pp, ep)
            if ep == 1 or (ep % tp == 0 and (candidate.fsdp * tp) % ep == 0):
                found.append(candidate)
    return found


def _distance(left: Layout, right: Layout) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(astuple(left), astuple(right), strict=True))
