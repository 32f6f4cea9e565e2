"""Whether documents with pictures stay apart in one row: tried, as for text, and compared with each alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from luthier.batch import Batch, Sample
from luthier.errors import first_line
from luthier.hf.anatomy import backbone_name, text_backbone
from luthier.hf.forward import TOLERANCE, hidden_states, masks_itself
from luthier.hf.head import head_logits
from luthier.hf.kinds import crosses, sees
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.vision.sight import Sight

_SIZES = ((40, 28), (24, 56))
"""Height and width of the pictures that are tried."""
_STARTS = ("a", "b 1 2 3 4 5 6 7 8 9 c")
"""Text before each: they do not stand in the same place of their documents."""


@contextmanager
def eyes_open(model: Any) -> Iterator[None]:
    """Within it all that sees takes part in the backward pass, whether a row has pictures or not.

    Ranks that share weights must each have a gradient for the same ones, and come to them in the same order; so what
    sees goes, times 0, into the embedded text.

    Args:
        model: that sees, or one of text alone, of which nothing changes.
    """
    if not sees(model.config):
        yield
        return
    text = {id(parameter) for parameter in text_backbone(model).parameters()}
    backbone = getattr(model, backbone_name(model))
    eyes = [one for one in backbone.parameters() if one.requires_grad and id(one) not in text]

    def add(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output + sum((one.reshape(-1)[:1].sum() * 0 for one in eyes), output.new_zeros(()))

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def pictures_apart(model: Any, sight: Sight) -> str:
    """Why documents with pictures cannot share a row, as a clause; empty where they can.

    Args:
        model: that sees, loaded; left in the mode that it is in.
        sight: its processor.
    """
    if crosses(model.config):
        return "its text looks at pictures by cross attention, which knows one document"
    if masks_itself(model):
        return "it works on its attention masks itself"
    training = model.training
    model.eval()
    try:
        return _compare(model, sight)
    except RAISED_BY_MODELS as error:
        return f"its forward refuses a packed row of images ({first_line(error)})"
    finally:
        model.train(training)


@torch.no_grad()
def _compare(model: Any, sight: Sight) -> str:
    from PIL import Image

    random = np.random.default_rng(0)
    shape = [(*size, 3) for size in _SIZES]
    pictures = [Image.fromarray(random.integers(0, 256, one, dtype=np.uint8)) for one in shape]
    tokenizer: Any = sight.processor.tokenizer
    samples = []
    for before, text in zip(_STARTS, sight.expansions(pictures), strict=True):
        ids = tokenizer(f"{before}{text} b c d", add_special_tokens=False)["input_ids"]
        samples.append(Sample.from_ids(ids, np.ones(len(ids))))
    tokens = [sample.tokens for sample in samples]
    packed = Batch.pack(samples).to(model.device)
    together = head_logits(model, hidden_states(model, replace(packed, sights=lambda: sight.inputs(pictures, tokens))))
    worst, start = 0.0, 0
    for number, own in enumerate(tokens):
        inputs = {name: value.to(model.device) for name, value in sight.inputs([pictures[number]], [own]).items()}
        ids = torch.from_numpy(own)[None].to(model.device)
        alone = model(input_ids=ids, use_cache=False, **inputs).logits[0].double()
        spread = (alone - alone.mean(-1, keepdim=True)).square().mean().clamp(min=1e-18)
        there = together[start : start + len(own)].double()
        worst, start = max(worst, float(((there - alone).square().mean() / spread).sqrt())), start + len(own)
    if worst > TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        return f"its logits differ by {worst:.1e} between packed documents with images and each alone"
    return ""
