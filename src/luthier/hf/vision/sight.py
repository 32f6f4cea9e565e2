"""What a model's processor does with pictures, as rows and batches need it, and the encoder of text with such in it.

A picture stands in a text as a tag. The processor writes so many tokens in the tag's place as the model makes of the
picture; here they are asked for once a row, and put into every text that is made of it. The numbers of the pictures
themselves are made when a batch runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from luthier.hf.quiet import quiet
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.render import Encoder

TAG = "<image>"
"""The tag in rows of data, whatever a model's own is."""
PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "cross_attention_mask")
"""Inputs of models that have an entry for every token, [1, T, ...]."""
_ATTRIBUTE, _BLIND = "luthier_sight", "luthier_blind"
_NO_EYES = ("the model reads none", "choose a model that sees (debug:llava is one), or take the column out")


class Sight:
    """A processor at work.

    Attributes:
        processor: of the model.
        tag: what the model's own texts have in the place of a picture.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor: Any = processor
        self.tag = str(vars(processor)["image_token"])
        self._shown: Sequence[str] = ()
        self._in_parts: bool | None = None

    def expansions(self, pictures: Sequence[Any]) -> list[str]:
        """The text that stands in each picture's place when the model reads it.

        Args:
            pictures: PIL images, in RGB.

        Raises:
            ValueError: the processor refuses a picture, such as one that is all too narrow.
        """
        made = self._process(pictures, return_text_replacement_offsets=True)
        found = made.get("text_replacement_offsets")
        return [self.tag] * len(pictures) if found is None else [str(one["replacement"]) for one in found[0]]

    def inputs(self, pictures: Sequence[Any], documents: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """What the model's forward reads beside the tokens of a row.

        Args:
            pictures: PIL images of all documents, in the order of their tags.
            documents: tokens of each, int64 [T of it].

        Returns:
            tensors by the names of the forward's arguments.
        """
        made = dict(self._process(pictures, return_tensors="pt").items())
        for name in ("input_ids", "attention_mask", "text_replacement_offsets"):
            made.pop(name, None)
        mask = made.pop("cross_attention_mask", None)
        for name in PER_TOKEN:
            if made.pop(name, None) is not None:  # of the tags alone
                row = np.concatenate(documents).tolist()
                made[name] = torch.tensor(self.processor.create_mm_token_type_ids([row]), dtype=torch.int64)
        if mask is not None:
            made["cross_attention_mask"] = self._crossing(mask, documents)
        return made

    @property
    def ids(self) -> frozenset[int]:
        """The tokens in whose place the model puts what it makes of pictures."""
        found = (*self.processor.image_token_ids, *self._ids_of(self.tag))
        return frozenset(token for token in found if token is not None)

    def own_ids(self, expansions: Sequence[str]) -> frozenset[int]:
        """Those, and the special tokens around them."""
        tokenizer = self.processor.tokenizer
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        return self.ids | {token for text in set(expansions) for token in self._ids_of(text) if token in special}

    def marks(self, expansion: str) -> int:
        """How many of `ids` are in a picture's text."""
        return sum(token in self.ids for token in self._ids_of(expansion))

    @property
    def fingerprint(self) -> str:
        """What decides how many tokens pictures become."""
        return hashlib.sha256(self.processor.to_json_string().encode()).hexdigest()

    def _ids_of(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _process(self, pictures: Sequence[Any], **options: Any) -> Any:
        with quiet():
            return self.processor(
                text=[self.tag * len(pictures)], images=[list(pictures)], add_special_tokens=False, **options
            )

    def _crossing(self, mask: torch.Tensor, documents: Sequence[np.ndarray]) -> torch.Tensor:
        """[1, T, pictures, tiles]: which tiles each token looks at. `mask` is of tags alone, the last of which, and all
        that follows, look at every picture."""
        (tokens,) = documents  # text that looks across is not packed
        tiles = mask[0, -1]  # [pictures, tiles]
        seen = torch.zeros(1, len(tokens), *tiles.shape, dtype=mask.dtype)
        places = np.flatnonzero(tokens == self.processor.image_token_id).tolist()
        last = len(tokens)
        for number, (start, end) in reversed(list(enumerate(zip(places, [*places[1:], last], strict=True)))):
            last = last if end == start + 1 else end  # of tags side by side each is looked at as long as the last
            seen[0, start:last, number] = tiles[number]
        return seen

    @contextmanager
    def showing(self, expansions: Sequence[str]) -> Iterator[None]:
        """Within it texts are those of a row with these pictures."""
        self._shown = expansions
        try:
            yield
        finally:
            self._shown = ()

    def expanded(self, text: str) -> str:
        """A text with the tokens of the row's pictures in the place of their tags."""
        left = iter(self._shown)
        return re.sub(re.escape(self.tag), lambda found: next(left, found.group()), text) if self._shown else text

    def in_parts(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the chat template wants contents as lists of parts; else it takes them as texts with tags in them."""
        if self._in_parts is None:
            probe: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Zq7x"}]}]
            try:
                text: Any = tokenizer.apply_chat_template(probe, tokenize=False)
            except (TemplateError, *RAISED_BY_MODELS):
                text = ""
            self._in_parts = str(text).count(self.tag) == 1 and "'type'" not in text
        return self._in_parts

    def parts(self, content: str) -> list[dict[str, str]]:
        """A text with tags as a list of parts."""
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(self.tag)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return parts or [{"type": "text", "text": ""}]


class SeeingEncoder(Encoder):
    """Text to ids, with the tokens of pictures in the place of their tags."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sight: Sight) -> None:
        self._sight = sight
        super().__init__(tokenizer)
        if sight.tag not in self._ids:  # it would be looked for in pieces, which are texts on their own
            self._cut = None

    def encode(self, text: str) -> list[int]:
        return super().encode(self._sight.expanded(text))

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text) if self._cut is None else self._by_pieces(self._sight.expanded(text))

    @property
    def sees(self) -> bool:
        return True

    def shaped(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if not self._sight.in_parts(self.tokenizer):
            return list(messages)
        return [
            {**message, "content": self._sight.parts(message["content"])}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def texts(self, content: str) -> list[str]:
        return content.split(self._sight.tag)


def give_sight(tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin) -> None:
    """Let rows of this tokenizer have pictures."""
    setattr(tokenizer, _ATTRIBUTE, Sight(processor))


def be_blind(tokenizer: PreTrainedTokenizerBase, why: str, remedy: str) -> None:
    """Remember why rows of this tokenizer have no pictures, though its model sees."""
    setattr(tokenizer, _BLIND, (why, remedy))


def blindness(tokenizer: Any) -> tuple[str, str]:
    """Why rows have no pictures, as a clause, and what to do about it."""
    found: tuple[str, str] = getattr(tokenizer, _BLIND, _NO_EYES)
    return found


def sight_of(tokenizer: Any) -> Sight | None:
    """What reads the pictures of rows; None for a model of text alone."""
    return getattr(tokenizer, _ATTRIBUTE, None)


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The encoder of a tokenizer's rows, with eyes where its model has them."""
    sight = sight_of(tokenizer)
    return Encoder(tokenizer) if sight is None else SeeingEncoder(tokenizer, sight)
