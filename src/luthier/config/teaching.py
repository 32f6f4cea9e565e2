"""Learning from another model, distillation, and from plain text, continued pre-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from luthier.config.method import Method
from luthier.config.sections import Fraction, PathText

if TYPE_CHECKING:
    from luthier.config.run import RunConfig


class DistillConfig(Method):
    """Distillation: the model is to say what a teacher of the same vocabulary would, token by token, on the rows."""

    only_speed: ClassVar[frozenset[str]] = frozenset({"precompute"})

    name: Literal["distill"]
    teacher: PathText
    """Named as `model` is; its vocabulary must be the model's."""
    teacher_revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    teacher_adapter: PathText | None = None
    """A directory of PEFT files to put on the teacher."""
    divergence: Literal["forward", "reverse", "symmetric", "jsd"] = "forward"
    """Of teacher and student: KL(teacher, student), KL(student, teacher), the mean of both, or Jensen and Shannon's."""
    beta: Fraction = 0.5
    """Of jsd: beta KL(teacher, M) + (1 - beta) KL(student, M), M = beta teacher + (1 - beta) student; as in TRL."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Divides the logits of both before they are compared."""
    cross_entropy: Fraction = 0.0
    """Share of the cross-entropy of the rows' own tokens in the loss."""
    top_k: PositiveInt | None = None
    """Compare the teacher's so many likeliest tokens, and all others together as one; the whole vocabulary when left
    out."""

    precompute: bool = False
    """Ask the teacher about every row that the run comes to once, before the first step, and keep its top_k under
    RUN/teacher; it is then in memory no more, and a run that goes on does not need it."""

    def check(self, run: RunConfig) -> None:
        """Refuse a beta that nothing reads, and to keep what is too large or never ends."""
        if self.precompute and (self.top_k is None or run.data.streaming):
            raise ValueError("method.precompute keeps top_k tokens of every row: set method.top_k, and do not stream")
        if "beta" in self.model_fields_set and self.divergence != "jsd" and self.beta != 0.5:
            raise ValueError(f"method.beta is of jsd, and the divergence is {self.divergence}; leave it out")


class PretrainConfig(Method):
    """Continued pre-training: every token of long documents trains, without a template. It is sft with what that takes:
    sources are read as text, and what is longer than data.sequence_length is split, not cut off, unless
    data.too_long says so."""

    name: Literal["pretrain"]
    end_of_document: bool = True
    """Train on the tokenizer's end after each document."""

    def check(self, run: RunConfig) -> None:
        """Read sources as text and split long documents, where nothing else is said; refuse rows of another kind."""
        data = run.data
        if "too_long" not in data.model_fields_set:
            data.too_long = "split"
        for source in [*(data.train or []), *(data.validation or [])]:
            source.format = source.format or "text"
            if source.format == "text" and not self.end_of_document:
                source.options = {**source.options, "eos": False}
            elif source.format != "text" and ":" not in source.format and source.format != "random":
                raise ValueError(
                    f"pretrain reads documents as text; for rows of format {source.format} use method: sft"
                )
