"""TrainState: all that a training step reads and changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from luthier.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from luthier.adapters import LoraReport
    from luthier.engine.logprobs import Head
    from luthier.hf.limits import Limits
    from luthier.hf.source import ModelSource


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


@dataclass
class TrainState:
    """A model, its optimizer and what they have done.

    `engine.build` makes it; `engine.step` is the only code that changes it.
    """

    model: Any
    """A Transformers model with adapters in place."""
    optimizer: Optimizer
    head: Head
    """How hidden states become log-probabilities."""
    device: torch.device
    source: ModelSource
    """Where the weights came from."""
    tokenizer: Any = None
    """Set by whoever loads one beside the model; the step needs none, an export takes it along."""
    counters: Counters = field(default_factory=Counters)
    lora: LoraReport | None = None
    """What was adapted; None in full fine-tuning."""
    row_multiple: int = 1
    """Microbatches are padded to a multiple of this many positions while they train."""
    packing_fault: str = ""
    """Why several documents cannot stand in one microbatch of this architecture; empty where they can."""

    limits: Limits | None = None
    """Which ids and how long rows the model can read; None = not known, so not checked."""

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that train, by full name; a tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
