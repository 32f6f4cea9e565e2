"""What training has not changed yet: a copy of the weights that train, taken before the first step, and the way back to
them for a while. With the copy in place the model is what it was before training, whatever its adapters are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from luthier.engine.state import TrainState
from luthier.hf.gather import local_part, reshard


class Initial:
    """The weights that train, as they are now: of this rank's part, of adapters few.

    Args:
        state: whose weights have not been trained yet.
    """

    def __init__(self, state: TrainState) -> None:
        reshard(state.model)
        self._copies = {name: local_part(p.detach()).clone() for name, p in state.trainable.items()}

    @contextmanager
    @torch.no_grad()
    def restored(self, state: TrainState) -> Iterator[None]:
        """The same weights within; afterwards those that they stood for, bit for bit. No backward pass may be open."""
        reshard(state.model)
        now = {name: local_part(p.detach()).clone() for name, p in state.trainable.items()}
        self._write(state, self._copies)
        try:
            yield
        finally:
            reshard(state.model)
            self._write(state, now)

    @torch.no_grad()
    def _write(self, state: TrainState, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in state.trainable.items():
            local_part(parameter.detach()).copy_(values[name])
