"""A small model of another's kind, to try on it what would be too dear, or too late, to try on the model itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from luthier.errors import ModelError, first_line
from luthier.hf.debug.shrink import LAYERS, shrink
from luthier.hf.quiet import quiet
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.rows.attention import parts_attention
from luthier.hf.rows.rotary import follow_documents


@dataclass(frozen=True)
class Kind:
    """What small models are made of. Two kinds of the same content are equal, so that what was tried may be cached.

    Attributes:
        cls: the architecture, as Transformers defines it.
        attention: name of its attention implementation; None for what Transformers chooses.
        text: the whole config, as JSON.
        config: of the model itself.
    """

    cls: type[PreTrainedModel]
    attention: str | None
    text: str
    config: Any = field(compare=False)


def kind_of(model: Any) -> Kind:
    """The kind of a model.

    Args:
        model: a Transformers model, on meta or not, not yet sharded: FSDP gives a model another class.
    """
    derived: Any = type(model)
    cls = getattr(
        sys.modules[derived.__module__], derived.__name__, derived
    )  # of a class that loading derives, the base
    return Kind(cls, model.config._attn_implementation, model.config.to_json_string(), model.config)


def make_small(kind: Kind, *, layers: int = LAYERS) -> Any:
    """A small model of a kind, always the same one.

    Args:
        kind: of the model that it stands for.
        layers: at least so many, as of `shrink`.

    Returns:
        on the CPU in fp32, in evaluation mode, with weights so large that what is missing or out of place shows in its
        numbers; rotary frequencies follow documents, as those of a loaded model do.

    Raises:
        ModelError: no such model can be made; `what` is a clause that says so.
    """
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        try:
            config = shrink(kind.config, layers=layers)
            config._attn_implementation = parts_attention(config, kind.attention)
            model: Any = kind.cls(config).float().eval()
        except RAISED_BY_MODELS as error:  # sizes that do not fit one another
            raise ModelError(f"no small model of its kind can be made to try it on ({first_line(error)})") from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    follow_documents(model)
    return model
