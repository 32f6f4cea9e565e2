"""Sizes of well-known models, for estimates where nothing can be downloaded."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def known() -> dict[str, dict[str, Any]]:
    """The table of models.yaml: full name -> fields of its config."""
    table = yaml.safe_load(files("luthier.estimate").joinpath("models.yaml").read_text(encoding="utf-8"))
    return {f"{fields.pop('owner')}/{name}": fields for name, fields in table.items()}


def full_name(model: str) -> str | None:
    """The name in the table of a model string, whose owner may be left out; None where it is not there."""
    names = {name.lower(): name for name in known()} | {name.partition("/")[2].lower(): name for name in known()}
    return names.get(model.strip().removeprefix("hf://").lower())
