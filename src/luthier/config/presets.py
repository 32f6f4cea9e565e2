"""The catalogue of models: for each what it starts from, its batch, its learning rates and its layouts.

`presets/models.yaml` has a row a model, `presets/layouts.yaml` what `luthier estimate` found to be the fastest way to
train it on so many GPUs (`make presets`). Imports neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

Method = Literal["full", "lora"]

GPUS_A_NODE = 8
"""Of the machines that the layouts were sought for."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A model as it is fine-tuned where nothing else is said.

    Attributes:
        name: its row; the runtime is `luthier-NAME`.
        model: Hub id.
        rows_per_step: rows of one optimizer step, over all processes.
        learning_rate: of full fine-tuning, and of adapters.
        sizes: its row in estimate/models.yaml.
        dataset: Hub id of the data set.
        format: of its rows.
        sequence_length: tokens.
        pictures: whether the model also sees, which is not trained.
        layouts: method -> number of GPUs -> degrees of `parallel` other than 1, and `activation_checkpointing`;
            numbers that are left out do not suffice.
    """

    name: str
    model: str
    rows_per_step: int
    learning_rate: Mapping[Method, float]
    sizes: str | None = None
    dataset: str = "tatsu-lab/alpaca"
    format: str = "instruct"
    sequence_length: int = 2048
    pictures: bool = False
    layouts: Mapping[Method, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)

    def gpus(self, method: Method) -> int:
        """The smallest number of GPUs that suffices, by the table; 1 where it has none."""
        return min(self.layouts.get(method, {}), default=1)

    def config(self, method: Method, ranks: int | None) -> dict[str, Any]:
        """What of a run's YAML follows from the preset; model, data source and output are the caller's.

        Args:
            method: full or lora.
            ranks: processes in all; None where that is not known yet. Where the table has no layout for them, the
                weights are sharded over all.
        """
        layout = dict(self.layouts.get(method, {}).get(ranks or 0, {}))
        train: dict[str, Any] = {"rows_per_step": self.rows_per_step}
        if checkpointing := layout.pop("activation_checkpointing", None):
            train["activation_checkpointing"] = checkpointing
        config: dict[str, Any] = {
            "data": {"sequence_length": self.sequence_length},
            "optimizer": {"learning_rate": self.learning_rate[method]},
            "train": train,
        }
        return config | ({"parallel": layout} if layout else {})


@cache
def presets() -> dict[str, Preset]:
    """Name -> preset, in the catalogue's order."""
    layouts = _read("layouts.yaml")
    return {name: Preset(name, **row, layouts=layouts.get(name, {})) for name, row in _read("models.yaml").items()}


def _read(name: str) -> dict[str, Any]:
    # libyaml's reader where it is there: ten times as fast
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("luthier.config").joinpath("presets", name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=loader) or {}
    return found
