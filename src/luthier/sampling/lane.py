"""The texts of one model, side by side: read, grown by a token each, taken out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from luthier.data.packing import best_fit
from luthier.errors import ModelError
from luthier.hf.decoding.lean import READING, LeanRows
from luthier.hf.decoding.slots import Prefix, padded
from luthier.hf.decoding.ways import rows_of
from luthier.hf.head import head_logits
from luthier.hf.limits import limits_of
from luthier.sampling.choose import choose, of_prompt, uniform
from luthier.sampling.packed import Copies, PackedLinears, stamp_of
from luthier.sampling.products import Adapter, JoinedProducts
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
        self._parameters = [module._parameters for module in self._modules if module._parameters]
        self._slots = slots
        self._rows = rows_of(model)
        self._joined, self._packed = None, None
        if isinstance(self._rows, LeanRows):
            self._joined = self._rows.products = JoinedProducts(model, self._rows.groups, slots, copies)
        else:
            self._packed = PackedLinears(model, copies)
        own = Adapter(model)
        self._own = own if own.layers else None
        self._settled = False
        self._read: dict[tuple[Adapter | None, tuple[int, ...], bool], Prefix] = {}
        self._stamp: tuple[tuple[int, int], ...] = ()

    def adapter(self, model: Any) -> Adapter | None:
        """The adapters of another model for texts of this lane; None where they cannot grow in one batch with its own:
        the weights beside them are others, or they are beside experts or in another dtype."""
        return Adapter(model) if self._joined is not None and self._joined.takes(model) else None

    def join(self, texts: Sequence[Text], others: Sequence[Text]) -> list[Text]:
        """Read the prompts of texts, each once for all samples of it, and sample their first tokens.

        Args:
            texts: become the last rows unless they are done.
            others: texts of this lane that are still to join.

        Returns:
            those that are done.
        """
        owners = {text.adapter or self._own for text in texts}
        self._look_at(owners)
        sound: list[Text] = []
        for text in texts:
            owner = text.adapter or self._own
            if owner is None or owner.finite:
                sound.append(text)
            else:
                text.fail()
        # prompts of one adapter are read at once; who has its prompt read alone is not worth a copy of the weights
        for owner in owners:
            its = [text for text in sound if (text.adapter or self._own) is owner]
            self._read_all([text for text in its if text.request.max_tokens > 1], owner)
            for text in its:
                if text.request.max_tokens <= 1:
                    self._read_all([text], owner)
        starting = [text for text in sound if text.request.max_tokens > 1 and text.room > 0]
        if self._joined is not None and starting:
            with self._computing([text.adapter or self._own for text in starting], packed=True):
                self._take(starting, self._logits(torch.stack([self._read[text.key].hidden[-1] for text in starting])))
        for text in sound:
            text.done = text.done or text.room == 0
            if not text.done:
                self._rows.place(len(self.active), self._read[text.key])
                self.active.append(text)
        wanted = {text.key for text in others}
        self._read = {key: prefix for key, prefix in self._read.items() if key in wanted}
        return [text for text in texts if text.done]

    def _read_all(self, texts: Sequence[Text], owner: Adapter | None) -> None:
        """Read prompts with one adapter, and tell of them; where each is alone, sample first tokens too."""
        new = list({text.key: text.request.prompt for text in texts if text.key not in self._read}.items())
        together = isinstance(self._rows, LeanRows) and any(text.request.max_tokens > 1 for text in texts)
        if together:
            self._settle()
        with self._computing([owner], packed=any(text.request.max_tokens > 1 for text in texts), text=True):
            if isinstance(self._rows, LeanRows) and together:
                for pack in best_fit([min(len(prompt), READING) for _, prompt in new], READING):
                    found = self._rows.read_together([new[number][1] for number in pack])
                    self._read |= {new[number][0]: prefix for number, prefix in zip(pack, found, strict=True)}
            else:
                self._read |= {key: self._rows.read(prompt) for key, prompt in new}
            for text in texts:
                prefix = self._read[text.key]
                if text.request.prompt_logprobs or text.request.topk_prompt_logprobs:
                    self._tell_prompt(text, prefix)
                if text.room > 0 and not together:
                    self._take([text], head_logits(self._model, prefix.hidden[-1:]))

    def _settle(self) -> None:
        if not self._settled:
            with self._computing([None] * self._slots, packed=True):
                self._rows.settle(self._slots)
            self._settled = True

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of the first rows, or of texts that will be the next ones."""
        size = self._rows.company(len(hidden))
        found = []
        for start in range(0, len(hidden), size):
            part = hidden[start : start + size]
            if self._joined is not None:
                self._joined.rows(start, size)
            found.append(head_logits(self._model, padded(part, size))[: len(part)])
        return found[0] if len(found) == 1 else torch.cat(found)

    def grow(self, texts: Sequence[Text]) -> list[Text]:
        """Let texts grow by a token: all that were active before others joined.

        Returns:
            those that are done, taken out.
        """
        self._look_at({text.adapter or self._own for text in texts})
        for text in texts:  # one's NaN would be everybody's in a product that they share
            if (owner := text.adapter or self._own) is not None and not owner.finite:
                text.fail()
        done = self._leave_done(len(texts))
        grown = self.active[: len(texts) - len(done)]
        if not grown:
            return done
        self._settle()
        with self._computing([text.adapter or self._own for text in grown], packed=True):
            self._take(grown, self._logits(self._rows.advance([text.result.tokens[-1] for text in grown])))
        return done + self._leave_done(len(grown))

    def _leave_done(self, count: int) -> list[Text]:
        """Take out those of the first texts that are done."""
        done = []
        for row in reversed(range(count)):
            if self.active[row].done:
                done.append(self.active[row])
                self.leave(row)
        return done

    def leave(self, row: int) -> None:
        """Take a text out; the last one gets its row, so that rows stand close."""
        last = self.active.pop()
        if row < len(self.active):
            self._rows.move(len(self.active), row)
            self.active[row] = last

    def rest(self) -> None:
        """Free what only growing texts need."""
        self._read.clear()
        for products in (self._joined, self._packed):
            if products is not None:
                products.give_up()

    def forget_old_weights(self) -> None:
        """Prompts that other weights have read are read again, and what was copied of weights is copied again."""
        parameters = [one for held in self._parameters for one in held.values() if one is not None]
        stamp = stamp_of(*parameters)
        if stamp != self._stamp:
            self._read.clear()
            if self._joined is not None:
                self._joined.changed()
        self._stamp = stamp

    def _look_at(self, owners: Iterable[Adapter | None]) -> None:
        """The same for adapters."""
        for owner in owners:
            if owner is not None and owner.look():
                self._read = {key: prefix for key, prefix in self._read.items() if key[0] is not owner}
                if self._joined is not None:
                    self._joined.forget(owner)

    @contextmanager
    def _computing(self, owners: Sequence[Adapter | None], *, packed: bool, text: bool = False) -> Iterator[None]:
        """Products are fast within and those of rows with these adapters."""
        with self._undisturbed():
            if self._joined is not None:
                with self._joined.used(owners, packed=packed, text=text):
                    yield
            elif self._packed is not None and packed:
                with self._packed.used():
                    yield
            else:
                yield

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
