"""Sizes of well-known models, for estimates where nothing can be downloaded."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from luthier.hf.source import ModelSource, config_from_fields, resolve


@cache
def known() -> dict[str, dict[str, Any]]:
    """The table of models.yaml: full name -> fields of its config."""
    table = yaml.safe_load(files("luthier.estimate").joinpath("models.yaml").read_text(encoding="utf-8"))
    return {f"{fields.pop('owner')}/{name}": fields for name, fields in table.items()}


def find_model(model: str, revision: str | None = None) -> tuple[ModelSource, Any | None]:
    """What a model string means for an estimate.

    Args:
        model: as `resolve` reads it; of a model in the table the owner may be left out.
        revision: of a Hub model; then the table is not asked.

    Returns:
        the source, and the config where the table has it.

    Raises:
        ModelError: there is no such file, directory, package or model type.
    """
    names = {name.lower(): name for name in known()} | {name.partition("/")[2].lower(): name for name in known()}
    full = names.get(model.strip().removeprefix("hf://").lower())
    source = resolve(full or model, revision=revision)
    if full is None or source.kind != "hub" or revision is not None:
        return source, None
    return source, config_from_fields(known()[full])
