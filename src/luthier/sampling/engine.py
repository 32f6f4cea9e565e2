"""Continuous batching: many texts grow side by side on one model, and a new one joins whenever there is room.

The model is the one that is being trained, adapters in place, and the next token is sampled from what its weights are
then. Between two calls it is as its owner left it: mode, gradients, attention.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from luthier.errors import ConfigError, DataError, ModelError, NonFiniteError
from luthier.hf.decoding import rows_of
from luthier.hf.head import head_logits
from luthier.hf.limits import limits_of
from luthier.hf.slots import Prefix, padded
from luthier.sampling.choose import Choice, choose, of_prompt, uniform
from luthier.sampling.packed import PackedLinears
from luthier.sampling.request import SamplingRequest, SamplingResult, TopTokens
from luthier.sampling.stopping import StopStrings

SLOTS = 32
"""Texts that grow side by side."""
_CHUNK = 64
"""Positions of a prompt whose logits are made at a time."""


@dataclass(slots=True)
class _Text:
    """A text that grows.

    Attributes:
        number: of its request.
        request: what was asked.
        seed: decides about its tokens.
        stops: ids that end it.
        strings: strings that end it.
        room: how many tokens there may be.
        key: what it has in common with those that can share the prompt once it is read.
        result: what there is of it.
        done: nothing is to come.
    """

    number: int
    request: SamplingRequest
    seed: int
    stops: frozenset[int]
    strings: StopStrings | None
    room: int
    key: tuple[tuple[int, ...], bool]
    result: SamplingResult = field(default_factory=lambda: SamplingResult([], [], "length"))
    done: bool = False

    def append(self, choice: Choice) -> None:
        """Take a token."""
        result = self.result
        result.tokens.append(choice.token)
        result.logprobs.append(choice.logprob)
        if result.topk is not None:
            result.topk.append(choice.top)
        if choice.token in self.stops or (self.strings is not None and self.strings.met(result.tokens)):
            result.stop_reason, self.done = "stop", True
        self.done = self.done or len(result.tokens) >= self.room


class SamplingEngine:
    """Samples from a model that stays its owner's.

    The tokens of a request with a seed, and their log-probabilities, are the same to the bit whatever else the engine
    is doing, in an engine of as many slots and a process of one thread (of several, the one that works on a row of
    attention may change its last bit in fp32). Not for use while another thread runs the model.

    Args:
        model: a causal language model of Transformers, whole, adapters in place; make another engine when layers are
            added to it.
        tokenizer: for stop strings, and for the end of a text where the model names none.
        stop_token_ids: what ends texts whose request names no stop; the model's own when left out.
        slots: how many texts may grow side by side; others wait.
        seed: of the requests that have none; unpredictable when left out.

    Raises:
        ModelError: the model's weights lie on several ranks.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        stop_token_ids: Sequence[int] | None = None,
        slots: int = SLOTS,
        seed: int | None = None,
    ) -> None:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            remedy = "sample in one process, from an export or the saved adapters"
            raise ModelError(
                "its weights lie on several ranks, each of which has a part", where="sampling", remedy=remedy
            )
        self._model = model
        self._tokenizer = tokenizer
        self._stops = frozenset(_ends_of(model, tokenizer) if stop_token_ids is None else stop_token_ids)
        self._slots = slots
        self._limits = limits_of(model)
        self._seeds = random.Random(seed)
        self._rows = rows_of(model)
        self._packed = PackedLinears(model)
        self._settled = False
        self._numbers = itertools.count()
        self._waiting: deque[_Text] = deque()
        self._active: list[_Text] = []
        self._ended: dict[int, SamplingResult] = {}
        self._read: dict[tuple[tuple[int, ...], bool], Prefix] = {}
        self._stamp: tuple[tuple[int, int], ...] = ()

    @property
    def busy(self) -> bool:
        """Whether a text is growing or waiting to."""
        return bool(self._waiting or self._active)

    def submit(self, request: SamplingRequest) -> int:
        """Let a request join, now or when there is a slot.

        Returns:
            its number.

        Raises:
            ConfigError: stop strings without a tokenizer, or an empty one.
            DataError: the prompt has a token that the model does not know, or is too long for it.
        """
        ids, positions = list(request.prompt), self._limits.positions
        if min(ids) < 0 or max(ids) >= self._limits.vocabulary:
            outside = next(token for token in ids if not 0 <= token < self._limits.vocabulary)
            what = f"token {outside} is not among the model's {self._limits.vocabulary:,}"
            raise DataError(what, where="prompt", remedy="use the model's own tokenizer")
        room = request.max_tokens
        if positions is not None:
            if len(ids) > positions:
                what = f"the prompt of {len(ids):,} tokens is longer than the {positions:,} positions of the model"
                raise DataError(what, where="prompt", remedy="shorten it")
            room = min(room, positions - len(ids) + 1)
        strings = request.stop_strings
        if strings and (self._tokenizer is None or not all(strings)):
            what = "stop strings need a tokenizer" if all(strings) else "an empty string would end every text"
            raise ConfigError(what, where="stop", remedy="give stop token ids")
        seed = self._seeds.getrandbits(63) if request.seed is None else request.seed
        stops = request.stop_ids
        text = _Text(
            next(self._numbers),
            request,
            seed,
            self._stops if stops is None else stops,
            StopStrings(strings, self._tokenizer) if strings else None,
            room,
            (tuple(ids), request.max_tokens > 1),
        )
        text.result.topk = [] if request.topk_logprobs else None
        self._waiting.append(text)
        return text.number

    def cancel(self, number: int) -> None:
        """Forget a request, whatever has become of it."""
        self._ended.pop(number, None)
        self._waiting = deque(text for text in self._waiting if text.number != number)
        for row, text in enumerate(self._active):
            if text.number == number:
                self._leave(row)
                break

    def tokens(self, number: int) -> list[int]:
        """What a request that has not ended has become so far."""
        return next((list(text.result.tokens) for text in self._active if text.number == number), [])

    def result(self, number: int) -> SamplingResult:
        """What became of a request that has ended; told once."""
        return self._ended.pop(number)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Submit requests and run until they have ended.

        Returns:
            their results, in their order.
        """
        numbers = [self.submit(request) for request in requests]
        while not all(number in self._ended for number in numbers):
            self.step()
        return [self.result(number) for number in numbers]

    def stream(self, request: SamplingRequest) -> Iterator[int]:
        """The tokens of one request as they come; the others go on meanwhile. Who stops reading cancels it."""
        number, told = self.submit(request), 0
        try:
            while number not in self._ended:
                self.step()
                tokens = self._ended[number].tokens if number in self._ended else self.tokens(number)
                yield from tokens[told:]
                told = len(tokens)
        finally:
            self.cancel(number)

    def step(self) -> list[int]:
        """Let those who wait join as far as there are slots, and all texts grow by a token.

        Returns:
            the numbers of the requests that have ended.

        Raises:
            NonFiniteError: the model's logits are NaN or infinite; every request is forgotten.
        """
        before = set(self._ended)
        with self._undisturbed(), torch.no_grad():
            self._forget_old_weights()
            grown = list(self._active)
            while self._waiting and len(self._active) < self._slots:
                text = self._waiting.popleft()
                # who reads the prompt alone is not worth a copy of the weights
                with self._packed.used() if text.request.max_tokens > 1 else nullcontext():
                    self._join(text)
            if grown:
                with self._packed.used():
                    self._grow(grown)
        if not self.busy:
            self._read.clear()
            self._packed.give_up()
        return [number for number in self._ended if number not in before]

    def _join(self, text: _Text) -> None:
        """Read a text's prompt, unless it has been for another sample of it, and sample its first token."""
        request = text.request
        prefix = self._read.pop(text.key, None) or self._rows.read(text.key[0])
        if any(other.key == text.key for other in self._waiting):
            self._read[text.key] = prefix
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            self._tell_prompt(text, prefix)
        if text.room > 0:
            self._take([text], head_logits(self._model, prefix.hidden[-1:]))
        if text.done or text.room == 0:
            self._ended[text.number] = text.result
            return
        self._rows.place(len(self._active), prefix)
        self._active.append(text)

    def _grow(self, grown: list[_Text]) -> None:
        """Let texts grow by a token; they are the first rows."""
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
                self._ended[grown[row].number] = grown[row].result
                self._leave(row)

    def _leave(self, row: int) -> None:
        """Take a text out; the last one gets its row, so that rows stand close."""
        last = self._active.pop()
        if row < len(self._active):
            self._rows.move(len(self._active), row)
            self._active[row] = last

    def _take(self, texts: Sequence[_Text], logits: Tensor) -> None:
        """Sample a token for each text."""
        steps = [uniform(text.seed, len(text.result.tokens)) for text in texts]
        choices = choose(logits, [text.request for text in texts], steps)
        if not all(math.isfinite(choice.logprob) for choice in choices):
            self._waiting.clear()
            self._active.clear()
            remedy = "look at the training run: its weights are beyond use"
            raise NonFiniteError("the model's logits are not finite", where="sampling", remedy=remedy)
        for text, choice in zip(texts, choices, strict=True):
            text.append(choice)

    def _tell_prompt(self, text: _Text, prefix: Prefix) -> None:
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

    def _forget_old_weights(self) -> None:
        """Prompts that other weights have read are read again."""
        stamp = tuple((parameter.data_ptr(), parameter._version) for parameter in self._model.parameters())
        if stamp != self._stamp:
            self._read.clear()
        self._stamp = stamp

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The model is in evaluation mode within, and each module in its own afterwards."""
        training = [module for module in self._model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _ends_of(model: Any, tokenizer: Any) -> list[int]:
    """What ends a text by the model's own generation config, and by its tokenizer."""
    of_config = getattr(model.generation_config, "eos_token_id", None)
    own = of_config if isinstance(of_config, list) else [of_config]
    ends = [*own, getattr(tokenizer, "eos_token_id", None)]
    return [int(token) for token in ends if token is not None]
