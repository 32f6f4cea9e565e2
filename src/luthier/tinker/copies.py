"""The whole model in every process, beside one that is laid out: what samples where no rank has all of what trains."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed as dist

from luthier.adapters import adapted, attach_all, beside, find_siblings, wholly_trained
from luthier.adapters.rows import rows_of
from luthier.engine.identity import model_digest
from luthier.engine.state import TrainState
from luthier.errors import ModelError
from luthier.hf.load import load_model
from luthier.hf.together import tell
from luthier.tinker.adapters import adapter_state_dict


class Copies:
    """Makes them. All ranks make the same calls.

    Args:
        state: on a layout, adapters in place.
        seed: of a debug model's weights.
    """

    def __init__(self, state: TrainState, seed: int) -> None:
        self._state = state
        self._seed = seed
        self._base: Any = None

    @property
    def base(self) -> Any:
        """The base model, whole in this process; read when it is needed first.

        Raises:
            ModelError: what is laid out does not have its weights, or trains whole.
        """
        if self._base is None:
            state = self._state
            if next(adapted(state.outline), None) is None:
                what = "a model that trains whole on several ranks is on none of them whole"
                remedy = "sample in one process, from what save_weights_for_sampler writes"
                raise ModelError(what, where="sampling", remedy=remedy)
            if wholly_trained(state.outline) or rows_of(state.outline):
                what = "modules trained whole and rows of tokens are on none of several ranks whole"
                remedy = "sample in one process, from what save_weights_for_sampler writes"
                raise ModelError(what, where="sampling", remedy=remedy)
            dtype = tell(state.model.dtype, dist.group.WORLD)
            base = load_model(state.source, dtype=dtype, device=state.device, seed=self._seed)
            if model_digest(base) != model_digest(state.model, dist.group.WORLD):
                what = f"{state.source.name} has other weights than the model in training began with"
                raise ModelError(what, where="sampling", remedy="give the client the seed that they were made with")
            self._base = base.requires_grad_(False)
        return self._base

    def snapshot(self) -> Any:
        """A model with the adapters as they are now."""
        model, weights = beside(self.base), adapter_state_dict(self._state)
        attach_all(model, {name: layer.lora_spec for name, layer in adapted(self._state.outline)}, ())
        model.load_state_dict(weights, strict=False)
        find_siblings(model)
        return model.requires_grad_(False).eval()

    def draw(self) -> int:
        """A seed that nobody chose, the same on every rank."""
        return int(tell(secrets.randbits(48), dist.group.WORLD))
