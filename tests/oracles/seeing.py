"""The reference for models that see: unmodified Transformers, each conversation alone, by the model's own processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.image_utils import load_image

from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.vision.processor import save_processor
from luthier.hf.vision.tiny_vision import seeing_processor
from tests.oracles.plain import Reference

SIZES = {"tall.png": (40, 30), "wide.png": (20, 64), "square.jpg": (33, 33), "small.png": (9, 12)}
"""Name -> height and width: processors cut, scale and tile them in every way that they have."""

CONVERSATIONS: list[dict[str, Any]] = [
    {"images": ["tall.png"], "messages": [("user", "<image>What is shown?"), ("assistant", "A tall picture.")]},
    {
        "images": ["wide.png", "square.jpg"],
        "messages": [
            ("user", "First <image> and then <image>: which is square?"),
            ("assistant", "The second."),
            ("user", "And which is wide?"),
            ("assistant", "The first, it is wide."),
        ],
    },
    {"images": [], "messages": [("user", "What is a picture?"), ("assistant", "Something to look at.")]},
    {"images": ["small.png"], "messages": [("user", "Look: <image>"), ("assistant", "I do.")]},
]
"""Conversations with one image, with several, and with none; text before and after them."""


def write_images(directory: Path, seed: int = 0) -> None:
    """The images of `CONVERSATIONS`, of random colours."""
    random = np.random.default_rng(seed)
    for name, (height, width) in SIZES.items():
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / name)


def write_rows(path: Path, conversations: Sequence[Mapping[str, Any]] = CONVERSATIONS) -> Path:
    """Conversations as a data file, with their images beside it."""
    write_images(path.parent)
    rows = [
        {"images": one["images"], "messages": [{"role": role, "content": text} for role, text in one["messages"]]}
        for one in conversations
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_seeing(kind: str, directory: Path, seed: int = 0) -> Path:
    """A tiny model that sees, with its processor, its weights so large that every fault shows."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(debug_config(kind), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * noise)  # gates of cross attention begin at 0, and would hide it
    model.save_pretrained(directory)
    save_processor(seeing_processor(kind, debug_tokenizer(kind)), directory)
    return directory


def encoded(processor: Any, conversation: Mapping[str, Any], directory: Path) -> tuple[Any, list[int]]:
    """A conversation's inputs by the processor, and the places of the tokens that train: what assistants say, and the
    token that ends it."""
    tokenizer = processor.tokenizer
    parts = []
    for role, text in conversation["messages"]:
        pieces = text.split("<image>")
        content = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            content += [{"type": "image"}, {"type": "text", "text": piece}]
        parts.append({"role": role, "content": content})
    text = tokenizer.apply_chat_template(parts, tokenize=False)
    images = [load_image(str(directory / name)) for name in conversation["images"]]
    shown = {"images": [images]} if images else {}
    inputs = processor(text=[text], **shown, add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    said = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    trained = []
    for start in range(len(ids)):
        if ids[start : start + len(said)] == said:
            first = start + len(said)
            trained += range(first, ids.index(end, first) + 1)
    return inputs, trained


def step(
    model: Any, processor: Any, directory: Path, conversations: Sequence[Mapping[str, Any]] = CONVERSATIONS
) -> Reference:
    """Loss and gradients of one step on conversations: the mean over all trained tokens."""
    model.zero_grad(set_to_none=True)
    made = [encoded(processor, conversation, directory) for conversation in conversations]
    total = sum(len(trained) for _, trained in made)
    loss = 0.0
    for inputs, trained in made:
        logits = model(**inputs, use_cache=False).logits[0]
        assert logits.dtype == model.dtype
        places = torch.tensor(trained)
        one = F.cross_entropy(logits[places - 1], inputs["input_ids"][0, places], reduction="sum") / total
        one.backward()
        loss += float(one.detach())
    return Reference(loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
