"""Schedules of a pipeline, as data: which order of torch's, how many stages a rank, and where each stage lies.

| name | order of work | stages a rank |
| --- | --- | --- |
| gpipe | all forward passes, then all backward passes | 1 |
| 1f1b | one forward, one backward in turns | 1 |
| interleaved_1f1b | the same, each rank at several places of the model | 2 or more |
| zero_bubble | gradients of weights fill the gaps (ZB1P) | 1 or more |
| zero_bubble_v | the same, stages in a V: the first rank has the last stage too (ZBV) | 2 |
| dualpipe_v | forward and backward passes of two microbatches at a time, in a V (DualPipeV) | 2 |

Sources: arXiv 1811.06965, 2104.04473, 2401.10241, 2412.19437, as torch.distributed.pipelining implements them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from luthier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Program:
    """One schedule.

    Attributes:
        schedule: name of torch's class.
        stages_per_rank: how many each rank holds when nobody says.
        fixed: no other number will do.
        folded: stages lie in a V, 0 1 2 | 5 4 3, not in loops, 0 1 2 | 3 4 5.
        rounds: microbatches must divide into rounds of at least a rank's worth.
        splits_backward: gradients of inputs and of weights are made at different times.
    """

    schedule: str
    stages_per_rank: int = 1
    fixed: bool = False
    folded: bool = False
    rounds: bool = False
    splits_backward: bool = False

    def ranks_of_stages(self, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """The rank that holds each stage, in order of stages.

        >>> PROGRAMS["interleaved_1f1b"].ranks_of_stages(2, 2), PROGRAMS["dualpipe_v"].ranks_of_stages(2, 2)
        ((0, 1, 0, 1), (0, 1, 1, 0))
        """
        loop = tuple(range(ranks))
        if not self.folded:
            return loop * stages_per_rank
        return tuple(rank for lap in range(stages_per_rank) for rank in (loop if lap % 2 == 0 else loop[::-1]))

    def microbatches(self, given: int, ranks: int, stages_per_rank: int) -> int:
        """The least number of microbatches, no fewer than those given, that the schedule can run.

        >>> PROGRAMS["1f1b"].microbatches(1, 4, 1), PROGRAMS["interleaved_1f1b"].microbatches(5, 2, 2)
        (4, 6)
        """
        if self.schedule == "Schedule1F1B":
            return max(given, ranks)
        if self.schedule == "ScheduleDualPipeV":
            return max(given, ranks * stages_per_rank)
        if self.rounds:
            return next(number for number in count(max(given, 1)) if number % max(1, number // ranks) == 0)
        return max(given, 1)

    def build(self, stages: list[Any], microbatches: int, loss: Any) -> Any:
        """The schedule of these stages of a rank; gradients are sums, so nothing is divided by microbatches."""
        from torch.distributed.pipelining import schedules  # what is said of a schedule needs no torch

        schedule = getattr(schedules, self.schedule)
        several = not issubclass(schedule, schedules.PipelineScheduleSingle)
        return schedule(stages if several else stages[0], microbatches, loss_fn=loss, scale_grads=False)


PROGRAMS = {
    "gpipe": Program("ScheduleGPipe", fixed=True),
    "1f1b": Program("Schedule1F1B", fixed=True),
    "interleaved_1f1b": Program("ScheduleInterleaved1F1B", 2, rounds=True),
    "zero_bubble": Program("ScheduleInterleavedZeroBubble", 2, rounds=True, splits_backward=True),
    "zero_bubble_v": Program("ScheduleZBVZeroBubble", 2, fixed=True, folded=True, splits_backward=True),
    "dualpipe_v": Program("ScheduleDualPipeV", 2, fixed=True, folded=True, splits_backward=True),
}


def stages_of(schedule: str, stages_per_rank: int | None) -> int:
    """How many stages each rank holds.

    Args:
        schedule: a name of `PROGRAMS`.
        stages_per_rank: asked for; None for what suits the schedule.

    Raises:
        ConfigError: the schedule takes another number.
    """
    program = PROGRAMS[schedule]
    if stages_per_rank is not None and program.fixed and stages_per_rank != program.stages_per_rank:
        free = " or ".join(name for name, other in PROGRAMS.items() if not other.fixed)
        raise ConfigError(
            f"{schedule} has {_said(program.stages_per_rank)} a rank, not {stages_per_rank}",
            where="parallel.stages_per_rank",
            remedy=f"leave it out, or set pipeline_schedule to {free}",
        )
    return stages_per_rank or program.stages_per_rank


def _said(stages: int) -> str:
    return "1 stage" if stages == 1 else f"{stages} stages"
