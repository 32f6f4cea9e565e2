"""Weights that are updated in the backward pass: as soon as a gradient is whole it is used and freed.

So no more than a few gradients are there at once, instead of one for every weight that trains. What needs all of them
first, clipping to a global norm or leaving a step out, cannot be had. (Lv et al. 2023, "Full Parameter Fine-tuning for
Large Language Models with Limited Resources", https://arxiv.org/abs/2306.09782.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from luthier.errors import NonFiniteError
from luthier.optim.optimizer import Optimizer


class InBackward:
    """Takes the optimizer's step weight by weight while gradients are made.

    Args:
        optimizer: of the parameters.
        parameters: those that train, by full name.
        square: the square of a gradient's 2-norm, as this rank is to count it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        square: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._optimizer, self._square, self._parameters = optimizer, square, parameters
        self._armed = False
        self._squares: list[torch.Tensor] = []
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Within, every gradient that a backward pass completes is used at once: it is the step's last."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def rest(self) -> None:
        """Use the gradients that are left: of weights that earlier microbatches reached, and the last one did not."""
        with self.armed():
            for name, parameter in self._parameters.items():
                self._take(name, parameter)

    def squares(self) -> list[torch.Tensor]:
        """Squares of the norms of the gradients that were used since this was last asked."""
        found, self._squares = self._squares, []
        return found

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        if not self._armed or parameter.grad is None:
            return
        square = self._square(parameter.grad)
        if not torch.isfinite(square):
            raise NonFiniteError(
                f"the gradient of {name} is not finite",
                where="optimizer.in_backward",
                remedy="lower optimizer.learning_rate, or go on from the last checkpoint without in_backward",
            )
        self._squares.append(square)
        self._optimizer.step(only=parameter)
        parameter.grad = None
