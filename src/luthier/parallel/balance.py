"""Which layers go to which stage: the slowest stage sets the pace, so the cut makes it as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luthier.hf.anatomy import describe
from luthier.parallel.stages import Part, Roles


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


def balance(layers: Sequence[float], after: float, stages: int) -> tuple[Part, ...]:
    """Deal layers to stages, in order and at least one to each, so that the most expensive stage costs least.

    Args:
        layers: cost of each.
        after: cost of what the last stage does besides (the head).
        stages: how many; no more than there are layers.

    >>> [(part.start, part.stop) for part in balance([1, 1, 1, 1, 1, 1], after=2, stages=2)]
    [(0, 4), (4, 6)]
    """
    count = len(layers)
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + layer)
    # best[n] = (cost of the dearest stage, sum of squares to break ties evenly, bounds) of the first n layers
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        last = stage == stages
        ends = [count] if last else range(stage, count - (stages - stage) + 1)
        nxt: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for start, (worst, squares, bounds) in best.items():
                if start < end:
                    own = sums[end] - sums[start] + (after if last else 0.0)
                    options.append((max(worst, own), squares + own * own, (*bounds, end)))
            if options:
                nxt[end] = min(options)
        best = nxt
    bounds = best[count][2]
    return tuple(Part(i, stages, bounds[i], bounds[i + 1]) for i in range(stages))
