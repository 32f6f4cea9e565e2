"""The loader's place, and what it hands out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from luthier.batch import Batch


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Everything that is needed to go on with the next row; JSON-able.

    Attributes:
        step: global batches handed out.
        epoch: passes that are complete.
        position: rows of this epoch that have been handed out; streaming: rows of the whole stream before the one that
            `piece` counts in.
        piece: streaming only: samples of the row at `position` that have been handed out.
        rows, tokens, trained_tokens: handed out in all.
        fingerprint: of the rows.
        settings: what else decides which rows a step has.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    piece: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    fingerprint: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> LoaderState:
        return LoaderState(**value)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One global batch, as one rank sees it.

    Attributes:
        microbatches: this rank's; every rank has equally many. The weights are the rows' own.
        state: the loader's place after this batch.
        rows, tokens, trained_tokens: of the whole global batch, all ranks together.
        total_weight: sum of all weights of the whole global batch: what the loss is to be divided by.
        epoch: passes through the rows so far, this batch included.
    """

    microbatches: list[Batch]
    state: LoaderState
    rows: int
    tokens: int
    trained_tokens: int
    total_weight: float
    epoch: float
