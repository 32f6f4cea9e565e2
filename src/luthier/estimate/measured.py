"""Well-known models in sizes, measured beforehand: a search among their layouts needs neither torch nor Transformers.

`sizes/OWNER--NAME.json` is what `prepare` finds for full fine-tuning in bf16 with AdamW on GPUs, and which degrees the
model admits. `make sizes` writes the files anew; a test holds them against the models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from luthier.config import RunConfig
from luthier.estimate.models import full_name
from luthier.estimate.shape import LayerShape, ModelShape

MOST = {"tp": 64, "cp": 64, "pp": 64, "ep": 1024}
"""Of each degree, the largest that was tried."""
MOST_RANKS = MOST["ep"]

_LAYER = TypeAdapter(LayerShape)
_MODEL = TypeAdapter(ModelShape)


@dataclass(frozen=True, slots=True)
class About:
    """A run's model.

    Attributes:
        architecture: its class.
        adapter: what was adapted, in a line.
        precision: of weights and arithmetic.
        shape: its sizes.
    """

    architecture: str
    adapter: str | None
    precision: str
    shape: ModelShape


@dataclass(frozen=True, slots=True)
class Kept:
    """What a file has.

    Attributes:
        about: the model.
        admitted: degree's name -> the degrees that it admits, up to `MOST`.
    """

    about: About
    admitted: Mapping[str, frozenset[int]]

    def refusal(self, name: str, degree: int) -> str | None:
        """Why a degree cannot be; None where it can, as all of data parallelism."""
        admitted = self.admitted.get(name)
        return None if admitted is None or degree in admitted else "its mathematics does not admit it"


def find(config: RunConfig) -> Kept | None:
    """What is kept of a run's model on GPUs; None where that was not measured beforehand."""
    usual = config.adapter is None and config.revision is None and config.train.precision in (None, "bf16")
    usual = usual and not config.optimizer.in_backward and config.method.name != "reward"
    full = (
        full_name(config.model)
        if usual and config.optimizer.name == "adamw" and config.optimizer.state_dtype == "fp32"
        else None
    )
    return _read(full) if full is not None else None


def file_name(full: str) -> str:
    """Of a model, by its full name."""
    return full.replace("/", "--") + ".json"


def to_json(about: About, admitted: Mapping[str, frozenset[int]]) -> dict[str, Any]:
    """What a file holds; layers of a kind are there once."""
    kinds = list(dict.fromkeys(about.shape.layers))
    sizes = _MODEL.dump_python(about.shape, mode="json", exclude={"layers"})
    return {
        "architecture": about.architecture,
        "precision": about.precision,
        "kinds": [_LAYER.dump_python(kind, mode="json") for kind in kinds],
        "layers": [kinds.index(layer) for layer in about.shape.layers],
        "admitted": {name: sorted(degrees) for name, degrees in admitted.items()},
        **sizes,
    }


def from_json(held: Mapping[str, Any]) -> Kept:
    """What `to_json` was given."""
    fields = dict(held)
    architecture, precision = fields.pop("architecture"), fields.pop("precision")
    admitted = {name: frozenset(degrees) for name, degrees in fields.pop("admitted").items()}
    kinds = [_LAYER.validate_python(kind) for kind in fields.pop("kinds")]
    order = fields.pop("layers")
    whole = _MODEL.validate_python({**fields, "layers": []})
    shape = ModelShape(
        **{name: getattr(whole, name) for name in fields}, layers=tuple(kinds[number] for number in order)
    )
    return Kept(About(architecture, None, precision, shape), admitted)


@cache
def _read(full: str) -> Kept | None:
    place = files("luthier.estimate").joinpath("sizes", file_name(full))
    if not place.is_file():
        return None
    return from_json(json.loads(place.read_text(encoding="utf-8")))
