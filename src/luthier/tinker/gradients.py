"""What calls have added up since the last optimizer step.

A call with weights adds its plain sum. Calls without weights are together one mean: each new one makes the earlier ones
smaller, so that in the end every target of all of them counts the same, however they were split. The two kinds lie
apart until a step adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

Kind = Literal["sum", "mean"]


class Gradients:
    """The gradients of a client.

    Args:
        parameters: those that train; their `.grad` holds one kind at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kind: Kind = "sum"
        self._aside: list[torch.Tensor | None] = [None] * len(self._parameters)
        self.targets = 0
        """Valid targets of all calls without weights."""

    def take(self, kind: Kind) -> None:
        """Let the next backward pass add to what is of this kind."""
        if kind == self._kind:
            return
        self._kind = kind
        for number, parameter in enumerate(self._parameters):
            self._aside[number], parameter.grad = parameter.grad, self._aside[number]

    @torch.no_grad()
    def make_room(self, targets: int) -> None:
        """Make the mean so far smaller, by as much as these more targets take of it."""
        self.take("mean")
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.targets / (self.targets + targets))
        self.targets += targets

    @torch.no_grad()
    def add_up(self) -> None:
        """Leave the sum of both kinds in `.grad`."""
        for number, parameter in enumerate(self._parameters):
            other = self._aside[number]
            if parameter.grad is None:
                parameter.grad = other
            elif other is not None:
                parameter.grad.add_(other)
            self._aside[number] = None
        self._kind, self.targets = "sum", 0

    def clear(self) -> None:
        """Forget all of it."""
        self.add_up()
        for parameter in self._parameters:
            parameter.grad = None
