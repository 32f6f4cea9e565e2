"""What a way of training keeps and runs beside the model that trains, and what nobody can say of it beforehand.

A copy of what trains as it was before the first step, where every step asks it (`RunConfig.compares_with_start`); a
teacher, whole on each rank; on data ranks of grpo a whole model that samples; a reference or a teacher that is asked
about all rows before the first step, and then let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from luthier.config import RunConfig
from luthier.config.methods import DpoConfig, KtoConfig
from luthier.config.reinforcement import GrpoConfig, RewardConfig
from luthier.config.teaching import DistillConfig
from luthier.estimate.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Beside:
    """Of one way of training.

    Attributes:
        documents: that a row has, each as long as a document may be.
        together: of these, how many stand in one microbatch.
        copies: what trains is kept as it was before the first step; a second time while that is asked.
        samples: on several ranks each has a whole model beside its shards.
        teacher: a model that is whole on every rank and runs forward in every step; None without one.
        asked: a model that is asked before the first step and then let go, laid out as the one that trains.
        reference: what `asked` is of, on meta.
        asked_whole: the same of one that is whole on every rank.
        forwards: how often the model that trains runs forward for each token of a step, beside what trains it.
        updates: passes forward and backward of each token of a step.
        compares: whether logits are compared with a teacher's: all of them, or the likeliest and the rest.
        notes: what is counted and what is not, a sentence each.
    """

    documents: int = 1
    together: int = 1
    copies: bool = False
    samples: bool = False
    teacher: ModelShape | None = None
    asked: ModelShape | None = None
    reference: Any = None
    asked_whole: ModelShape | None = None
    forwards: int = 0
    updates: int = 1
    compares: Literal["", "all", "likeliest"] = ""
    notes: tuple[str, ...] = ()


NOTHING = Beside()
_PAIR = "a row is 2 answers, of which each has its prompt counted with it"
_ONCE = "is asked once about each row, before the first step, and those operations are not counted"
_COPY = "what trains is kept as it was before the first step, and run forward in every step"


def beside(config: RunConfig, *, cpu: bool) -> Beside:
    """What a run's method keeps and runs beside its model. Of another model its config is read.

    Args:
        config: of the run.
        cpu: for the CPU.

    Raises:
        ModelError: that model's config cannot be found or read.
    """
    method = config.method
    match method:
        case DpoConfig() | KtoConfig():
            return _with_reference(config, method, cpu)
        case GrpoConfig():
            notes = [
                f"a row is a prompt with {method.group_size} answers, of which each with its prompt is taken to fill "
                "data.sequence_length",
                "sampling is not counted: neither its operations nor its cache, which the lengths of answers decide",
                "on several ranks each has a whole model beside its shards, which samples",
            ]
            again = method.updates_per_sample > 1
            notes += [_COPY] * config.compares_with_start
            notes += ["answers are run forward once more, before the first update"] * again
            return Beside(
                documents=method.group_size,
                copies=config.compares_with_start,
                samples=True,
                forwards=config.compares_with_start + again,
                updates=method.updates_per_sample,
                notes=tuple(notes),
            )
        case RewardConfig():
            return Beside(2, 2, notes=("a row is 2 texts", "there is no head but the score of a text's last token"))
        case DistillConfig():
            from luthier.estimate.prepare import prepare_other

            teacher = prepare_other(config, "method.teacher", method.teacher, method.teacher_revision, cpu=cpu).shape
            how: Literal["all", "likeliest"] = "all" if method.top_k is None else "likeliest"
            if method.precompute:
                said = f"the teacher, whole on each rank, {_ONCE}"
                return Beside(asked_whole=teacher, compares=how, notes=(said,))
            notes = ["the teacher is whole on each rank, and runs forward in every step"]
            notes += ["its adapter is not counted"] * (method.teacher_adapter is not None)
            return Beside(teacher=teacher, compares=how, notes=tuple(notes))
        case _ if method.rows == "pairs":
            return Beside(2, 2, notes=(_PAIR,))
        case _:
            return NOTHING


def _with_reference(config: RunConfig, method: DpoConfig | KtoConfig, cpu: bool) -> Beside:
    copies = config.compares_with_start
    other = None
    if method.reference not in ("precomputed", "base"):
        from luthier.estimate.prepare import prepare_other

        other = prepare_other(config, "method.reference", method.reference, None, cpu=cpu)
    if copies:
        said = _COPY
    elif other is not None:
        said = f"the reference, laid out as the model, {_ONCE}"
    else:
        said = f"the reference, which is the model itself, {_ONCE}"
    asked = {"asked": other.shape, "reference": other.model} if other is not None else {}
    if isinstance(method, DpoConfig):
        return Beside(2, 2, copies=copies, forwards=int(copies), notes=(_PAIR, said), **asked)
    foreign = "beside each answer another prompt's is run forward, and taken to be as long"
    return Beside(copies=copies, forwards=1 + 2 * copies, notes=(foreign, said), **asked)
