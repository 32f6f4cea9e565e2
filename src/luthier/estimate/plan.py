"""What is to be estimated: a layout, a batch on it, and what each rank of the pipeline holds of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from luthier.estimate.shape import LayerShape, ModelShape, Weight
from luthier.parallel.balance import balance
from luthier.parallel.layout import Layout
from luthier.parallel.programs import PROGRAMS

Checkpointing = Literal["off", "full", "selective", "offloaded"]

AGAIN: dict[Checkpointing, float] = {"off": 0.0, "selective": 0.5, "full": 1.0, "offloaded": 1.0}
"""How often a layer runs forward once more, on the average."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a step.

    Attributes:
        layout: its degrees.
        length: tokens of each document.
        rows: documents in a microbatch, packed into one row.
        microbatches: of each data rank in a step.
        checkpointing: which layers are computed again in the backward pass.
        reshard: layers give their gathered weights back after the forward.
        sequence_parallel: norms and residuals are cut over tp.
        cpu_offload: shards of weights, gradients and moments lie in the host's memory.
        in_backward: weights are updated while gradients are made.
        schedule: of the pipeline.
        stages_per_rank: stages that each of its ranks holds.
    """

    layout: Layout
    length: int
    rows: int = 1
    microbatches: int = 1
    checkpointing: Checkpointing = "off"
    reshard: bool = True
    sequence_parallel: bool = False
    cpu_offload: bool = False
    in_backward: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    @property
    def row_tokens(self) -> int:
        """Positions of a microbatch."""
        return self.rows * self.length

    @property
    def local_tokens(self) -> int:
        """Of these, those that one rank of cp holds: rows are padded so that all hold the same."""
        cp = self.layout.cp
        if cp == 1:
            return self.row_tokens
        return -(-self.row_tokens // (2 * cp)) * 2

    @property
    def step_tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.row_tokens * self.microbatches * self.layout.data_ranks

    @property
    def in_flight(self) -> tuple[int, ...]:
        """How many microbatches' activations each rank of the pipeline keeps at most, in whole ranks' worth."""
        ranks, microbatches, held = self.layout.pp, self.microbatches, self.stages_per_rank
        match self.schedule:
            case "gpipe":
                return (microbatches,) * ranks
            case "1f1b":
                return tuple(min(microbatches, ranks - rank) for rank in range(ranks))
            case "interleaved_1f1b" | "zero_bubble":
                warm = [(ranks - rank - 1) * 2 + (held - 1) * ranks + 1 for rank in range(ranks)]
                return tuple(-(-min(microbatches * held, chunks) // held) for chunks in warm)
            case _:  # both in a V: a rank holds an early and a late stage, and together a rank's worth for each rank
                return (min(microbatches, ranks),) * ranks


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank of the pipeline has of a model.

    Attributes:
        rank: in the pipeline.
        kinds: the layers that it runs, each kind with how many there are.
        first, last: whether it embeds tokens, whether it has the head.
        outside: weights outside of the layers, which FSDP gathers as one group; a tied embedding on a last stage that
            is not the first is among them.
    """

    rank: int
    kinds: tuple[tuple[LayerShape, int], ...]
    first: bool
    last: bool
    outside: tuple[Weight, ...]

    def sum(self, value: Callable[[LayerShape], float]) -> float:
        """Of a number of each layer."""
        return sum(count * value(layer) for layer, count in self.kinds)


@lru_cache(maxsize=4096)
def held_by(shape: ModelShape, ranks: int, schedule: str = "1f1b", stages_per_rank: int = 1) -> tuple[Held, ...]:
    """What each rank of a pipeline holds, by the cut that the engine makes.

    Args:
        shape: the model.
        ranks: of the pipeline.
        schedule: tells where stages lie.
        stages_per_rank: how many each rank holds.
    """
    stages = ranks * stages_per_rank
    after = sum(w.count for w in shape.after) + (shape.vocabulary * shape.width if shape.tied else 0)
    parts = balance([_cost(layer) for layer in shape.layers], float(after), stages)
    places = PROGRAMS[schedule].ranks_of_stages(ranks, stages_per_rank) if ranks > 1 else (0,) * stages
    held = []
    for rank in range(ranks):
        own = [part for part, place in zip(parts, places, strict=True) if place == rank]
        first, last = any(part.is_first for part in own), any(part.is_last for part in own)
        outside = (*(shape.before if first else ()), *(shape.after if last else ()))
        if last and not first and shape.tied:
            outside = (*outside, *shape.before)
        kinds = Counter(layer for part in own for layer in shape.layers[part.start : part.stop])
        held.append(Held(rank, tuple(kinds.items()), first, last, outside))
    return tuple(held)


def different(held: tuple[Held, ...]) -> Iterable[Held]:
    """The ranks of a pipeline, without those that hold just what one before holds: it has no less in flight."""
    seen = set()
    for one in held:
        contents = (one.kinds, one.first, one.last)
        if contents not in seen:
            seen.add(contents)
            yield one


def _cost(layer: LayerShape) -> float:
    """In weights that a token is multiplied by, as the engine counts."""
    return sum(
        weight.count * (layer.visited / weight.shape[0] if weight.expert and layer.visited else 1.0)
        for weight in layer.weights
    )
