"""What rows of data are to a way of training: the method of a run decides it, and the data section carries it along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from luthier.config.sections import DataConfig

Kind = Literal["documents", "pairs", "labelled", "prompts"]
"""A document that trains; two answers to a prompt, of which the first is preferred; an answer with a label, good or
bad; a prompt alone."""


def kind_of(data: DataConfig) -> Kind:
    """What the rows of a data section have to be."""
    return cast(Kind, data._kind)


def set_kind(data: DataConfig, kind: Kind) -> None:
    """Say what the rows of a data section have to be; no key of the YAML, since the method says it."""
    data._kind = kind
