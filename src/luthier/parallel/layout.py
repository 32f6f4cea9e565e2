"""Degrees of a layout, and what follows from them alone. Imports no torch: an estimate needs none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from luthier.config.sections import ParallelConfig
from luthier.errors import ConfigError

Refusal = Callable[[str, int], str | None]
"""(name of a degree, degree) -> why it cannot be, as a clause; None where it can."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Resolved degrees, all at least 1."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Parts that each global batch is dealt into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that a weight is sharded over: those of context parallelism hold shards too."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that an expert's weight is sharded over, once the experts are dealt to the ranks of ep."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @staticmethod
    def resolve(config: ParallelConfig, ranks: int) -> Layout:
        """The layout of a config on some processes.

        Args:
            config: its degrees; one of them may be -1, and dp_shard's default of -1 gives way to another.
            ranks: processes there are.

        Raises:
            ConfigError: the degrees do not multiply to the ranks.
        """
        degrees = {field.name: int(getattr(config, field.name)) for field in fields(Layout)}
        open_ones = [name for name, degree in degrees.items() if degree == -1]
        if len(open_ones) > 1 and "dp_shard" in open_ones and "dp_shard" not in config.model_fields_set:
            degrees["dp_shard"] = 1
            open_ones.remove("dp_shard")
        if len(open_ones) > 1:
            raise ConfigError(f"{' and '.join(open_ones)} are both -1", where="parallel", remedy="give one a number")
        if open_ones == ["ep"]:
            degrees["ep"] = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        elif open_ones:
            rest = math.prod(degree for name, degree in degrees.items() if degree > 0 and name != "ep")
            if ranks % rest:
                raise ConfigError(
                    f"{_said(degrees)} takes a multiple of {rest} processes, and there {_are(ranks)}",
                    where="parallel",
                    remedy=f"start {rest * max(1, round(ranks / rest))} (--nproc), or choose other degrees",
                )
            degrees[open_ones[0]] = ranks // rest
        layout = Layout(**degrees)
        if layout.ranks != ranks:
            raise ConfigError(
                f"{layout} takes {layout.ranks} processes, and there {_are(ranks)}",
                where="parallel",
                remedy=f"start {layout.ranks} (--nproc {layout.ranks}), or set one degree to -1",
            )
        whole = layout.fsdp * layout.tp
        if layout.ep > 1 and (layout.ep % layout.tp or whole % layout.ep):
            raise ConfigError(
                f"ep {layout.ep} is no multiple of tp {layout.tp} that divides dp_shard x cp x tp = {whole}",
                where="parallel.ep",
                remedy=f"set it to {_nearest_ep(layout)}",
            )
        return layout

    def __str__(self) -> str:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        order = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
        said = _said({name: named[name] for name in order if named[name] > 1})
        return said or "one process"


def _said(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _are(ranks: int) -> str:
    return "is 1" if ranks == 1 else f"are {ranks}"


def _nearest_ep(layout: Layout) -> int:
    whole = layout.fsdp * layout.tp
    fitting = [ep for ep in range(layout.tp, whole + 1, layout.tp) if whole % ep == 0]
    return min(fitting, key=lambda ep: (abs(ep - layout.ep), ep))
