"""TrainState: all that a training step reads and changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from luthier.engine.network import Network
from luthier.optim.in_backward import InBackward
from luthier.optim.optimizer import Optimizer


@dataclass
class Counters:
    """What a run has done so far; part of every checkpoint."""

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""


@dataclass(kw_only=True)
class TrainState(Network):
    """A network, its optimizer and what they have done.

    `engine.build` makes it; `engine.step` is the only code that changes it.
    """

    optimizer: Optimizer
    in_backward: InBackward | None = None
    """Updates weights while gradients are made; None where a step begins when all are there."""
    tokenizer: Any = None
    """Set by whoever loads one beside the model; the step needs none, an export takes it along."""
    counters: Counters = field(default_factory=Counters)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that train, by full name; a tied one once. On a layout those of this rank's stage."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
