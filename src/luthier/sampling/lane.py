"""The texts of one model, side by side: read, grown by a token each, taken out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from luthier.errors import ModelError
from luthier.hf.decoding import rows_of
from luthier.hf.head import head_logits
from luthier.hf.limits import limits_of
from luthier.hf.slots import Prefix, padded
from luthier.sampling.choose import choose, of_prompt, uniform
from luthier.sampling.packed import Copies, PackedLinears
from luthier.sampling.request import TopTokens
from luthier.sampling.text import Text

_CHUNK = 64
"""Positions of a prompt whose logits are made at a time."""


class Lane:
    """Texts of one model that grow side by side.

    Args:
        model: a causal language model of Transformers, whole, adapters in place.
        slots: how many texts there may be.
        copies: of the matrices, shared with other lanes over the same weights.

    Attributes:
        limits: what the model can read.
        active: the texts, by row.

    Raises:
        ModelError: the model's weights lie on several ranks.
    """

    def __init__(self, model: Any, slots: int, copies: Copies) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            remedy = "sample in one process, from an export or the saved adapters"
            raise ModelError(
                "its weights lie on several ranks, each of which has a part", where="sampling", remedy=remedy
            )
        self.limits = limits_of(model)
        self.active: list[Text] = []
        self._model = model
        self._modules = list(model.modules())
        self._slots = slots
        self._rows = rows_of(model)
        self._packed = PackedLinears(model, copies)
        self._settled = False
        self._read: dict[tuple[tuple[int, ...], bool], Prefix] = {}
        self._stamp: list[tuple[int, int]] = []

    def join(self, text: Text, others: Iterator[Text]) -> None:
        """Read a text's prompt, unless it has been for another sample of it, and sample its first token.

        Args:
            text: becomes the last row unless it is done.
            others: texts of this model that are still to join.
        """
        request = text.request
        # who reads the prompt alone is not worth a copy of the weights
        with self._undisturbed(), self._packed.used() if request.max_tokens > 1 else nullcontext():
            prefix = self._read.pop(text.key, None) or self._rows.read(text.key[0])
            if any(other.key == text.key for other in others):
                self._read[text.key] = prefix
            if request.prompt_logprobs or request.topk_prompt_logprobs:
                self._tell_prompt(text, prefix)
            if text.room > 0:
                self._take([text], head_logits(self._model, prefix.hidden[-1:]))
        text.done = text.done or text.room == 0
        if not text.done:
            self._rows.place(len(self.active), prefix)
            self.active.append(text)

    def grow(self, count: int) -> list[Text]:
        """Let the first texts grow by a token.

        Returns:
            those that are done, taken out.
        """
        grown = self.active[:count]
        with self._undisturbed(), self._packed.used():
            if not self._settled:
                self._rows.settle(self._slots)
                self._settled = True
            hidden = self._rows.advance([text.result.tokens[-1] for text in grown])
            size = self._rows.company(len(grown))
            parts = [hidden[start : start + size] for start in range(0, len(hidden), size)]
            logits = [head_logits(self._model, padded(part, size))[: len(part)] for part in parts]
            self._take(grown, torch.cat(logits))
        for row in reversed(range(len(grown))):
            if grown[row].done:
                self.leave(row)
        return [text for text in grown if text.done]

    def leave(self, row: int) -> None:
        """Take a text out; the last one gets its row, so that rows stand close."""
        last = self.active.pop()
        if row < len(self.active):
            self._rows.move(len(self.active), row)
            self.active[row] = last

    def rest(self) -> None:
        """Free what only growing texts need."""
        self._read.clear()
        self._packed.give_up()

    def forget_old_weights(self) -> None:
        """Prompts that other weights have read are read again."""
        stamp = [
            (parameter.data_ptr(), parameter._version)
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        if stamp != self._stamp:
            self._read.clear()
        self._stamp = stamp

    def _take(self, texts: Sequence[Text], logits: Tensor) -> None:
        """Sample a token for each text."""
        steps = [uniform(text.seed, len(text.result.tokens)) for text in texts]
        choices = choose(logits, [text.request for text in texts], steps)
        for text, choice in zip(texts, choices, strict=True):
            if math.isfinite(choice.logprob):
                text.append(choice)
            else:
                text.fail()

    def _tell_prompt(self, text: Text, prefix: Prefix) -> None:
        """Log-probabilities of the prompt, of each position's own distribution; logits are made in chunks."""
        logprobs: list[float | None] = [None]
        tops: list[TopTokens | None] = [None]
        targets = torch.tensor(prefix.tokens[1:], dtype=torch.int64, device=prefix.hidden.device)
        for start in range(0, len(targets), _CHUNK):
            part = targets[start : start + _CHUNK]
            logits = head_logits(self._model, prefix.hidden[start : start + len(part)])
            told, top = of_prompt(logits, part, text.request.topk_prompt_logprobs)
            logprobs += told
            tops += top
        text.result.prompt_logprobs = logprobs if text.request.prompt_logprobs else None
        text.result.topk_prompt_logprobs = tops if text.request.topk_prompt_logprobs else None

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The model is in evaluation mode within, and each module in its own afterwards."""
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
