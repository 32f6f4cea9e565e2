"""Continuous batching: many texts grow side by side on one model, and a new one joins whenever there is room.

The model is the one that is being trained, adapters in place, and the next token is sampled from what its weights are
then. Other adapters over the same base can be added and removed while texts grow, and each request names one. Between
two calls every model is as its owner left it: mode, gradients, attention.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from luthier.config.suggest import nearest
from luthier.errors import ConfigError, DataError
from luthier.sampling.lane import Lane
from luthier.sampling.packed import Copies
from luthier.sampling.products import Adapter
from luthier.sampling.request import SamplingRequest, SamplingResult
from luthier.sampling.stopping import StopStrings
from luthier.sampling.text import Text

SLOTS = 32
"""Texts that grow side by side."""


class SamplingEngine:
    """Samples from a model that stays its owner's, and from other adapters over its base.

    The tokens of a request with a seed, and their log-probabilities, are the same to the bit whatever else the engine
    is doing, other adapters included, in an engine of as many slots and a process of one thread (of several, the one
    that works on a row of attention may change its last bit in fp32). Not for use while another thread runs the model.

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
        self._copies = Copies()
        self._base = Lane(model, slots, self._copies)
        self._owners: dict[str | None, tuple[Lane, Adapter | None]] = {None: (self._base, None)}
        self._tokenizer = tokenizer
        self._stops = frozenset(_ends_of(model, tokenizer) if stop_token_ids is None else stop_token_ids)
        self._slots = slots
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()
        self._waiting: deque[tuple[Lane, Text]] = deque()
        self._running: list[Lane] = []
        self._ended: dict[int, Text] = {}

    @property
    def busy(self) -> bool:
        """Whether a text is growing or waiting to."""
        return bool(self._waiting or self._running)

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give."""
        return [name for name in self._owners if name is not None]

    def add(self, name: str, model: Any) -> None:
        """Let requests name an adapter from now on; texts that grow are not touched.

        Args:
            name: not in use.
            model: a model that carries the adapter, in training or not, over the base weights of the engine's own
                (`adapters.beside`, `tinker.sampler.snapshot`); it is read at each step, as the engine's own is.

        Raises:
            ConfigError: the name is in use.
            ModelError: the model's weights lie on several ranks.
        """
        if name in self._owners:
            raise ConfigError(f"there is an adapter {name!r} already", where="adapter", remedy="remove it first")
        adapter = self._base.adapter(model)
        lane = Lane(model, self._slots, self._copies) if adapter is None else self._base
        self._owners[name] = (lane, adapter)

    def remove(self, name: str) -> None:
        """Forget an adapter. Its texts that wait or grow go on to their end; its memory is free when they are there.

        Raises:
            ConfigError: there is no adapter of this name.
        """
        self._owner(name)
        del self._owners[name]

    def submit(self, request: SamplingRequest) -> int:
        """Let a request join, now or when there is a slot.

        Returns:
            its number.

        Raises:
            ConfigError: an adapter that is not there; stop strings without a tokenizer, or an empty one.
            DataError: the prompt has a token that the model does not know, or is too long for it.
        """
        lane, adapter = self._owner(request.adapter)
        ids, positions = list(request.prompt), lane.limits.positions
        if min(ids) < 0 or max(ids) >= lane.limits.vocabulary:
            outside = next(token for token in ids if not 0 <= token < lane.limits.vocabulary)
            what = f"token {outside} is not among the model's {lane.limits.vocabulary:,}"
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
        text = Text(
            next(self._numbers),
            request,
            seed,
            self._stops if stops is None else stops,
            StopStrings(strings, self._tokenizer) if strings else None,
            room,
            adapter,
            (adapter, tuple(ids), request.max_tokens > 1),
        )
        text.result.topk = [] if request.topk_logprobs else None
        self._waiting.append((lane, text))
        return text.number

    def cancel(self, number: int) -> None:
        """Forget a request, whatever has become of it."""
        self._ended.pop(number, None)
        self._waiting = deque(pair for pair in self._waiting if pair[1].number != number)
        for lane in self._running:
            row = next((row for row, text in enumerate(lane.active) if text.number == number), None)
            if row is not None:
                lane.leave(row)
        self._let_rest()

    def tokens(self, number: int) -> list[int]:
        """What a request that has not ended has become so far."""
        growing = (text for lane in self._running for text in lane.active)
        return next((list(text.result.tokens) for text in growing if text.number == number), [])

    def result(self, number: int) -> SamplingResult:
        """What became of a request that has ended; told once.

        Raises:
            NonFiniteError: the logits of its model became NaN or infinite; the texts of others go on.
        """
        text = self._ended.pop(number)
        if text.fault is not None:
            raise text.fault
        return text.result

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Submit requests and run until they have ended.

        Returns:
            their results, in their order.

        Raises:
            NonFiniteError: as of `result`; the others of these requests are forgotten.
        """
        numbers: list[int] = []
        try:
            numbers += [self.submit(request) for request in requests]
            while not all(number in self._ended for number in numbers):
                self.step()
            return [self.result(number) for number in numbers]
        finally:
            for number in numbers:
                self.cancel(number)

    def stream(self, request: SamplingRequest) -> Iterator[int]:
        """The tokens of one request as they come; the others go on meanwhile. Who stops reading cancels it.

        Raises:
            NonFiniteError: as of `result`.
        """
        number, told = self.submit(request), 0
        try:
            while number not in self._ended:
                self.step()
                tokens = self._ended[number].result.tokens if number in self._ended else self.tokens(number)
                yield from tokens[told:]
                told = len(tokens)
            self.result(number)
        finally:
            self.cancel(number)

    def step(self) -> list[int]:
        """Let those who wait join as far as there are slots, and all texts grow by a token.

        Returns:
            the numbers of the requests that have ended, well or not.
        """
        for lane in {id(lane): lane for lane in [*self._running, *(lane for lane, _ in self._waiting)]}.values():
            lane.forget_old_weights()
        grown = [(lane, list(lane.active)) for lane in self._running if lane.active]
        ended: list[Text] = []
        while self._waiting and (room := self._slots - sum(len(lane.active) for lane in self._running)) > 0:
            joining: dict[int, tuple[Lane, list[Text]]] = {}
            for lane, text in [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]:
                joining.setdefault(id(lane), (lane, []))[1].append(text)
            for lane, texts in joining.values():
                if lane not in self._running:
                    self._running.append(lane)
                ended += lane.join(texts, [other for where, other in self._waiting if where is lane])
        for lane, texts in grown:
            ended += lane.grow(texts)
        self._ended |= {text.number: text for text in ended}
        self._let_rest()
        return [text.number for text in ended]

    def _owner(self, name: str | None) -> tuple[Lane, Adapter | None]:
        if name in self._owners:
            return self._owners[name]
        close = nearest(str(name), self.adapters)
        remedy = f"did you mean {close!r}?" if close else "add it first"
        raise ConfigError(f"there is no adapter {name!r}", where="adapter", remedy=remedy)

    def _let_rest(self) -> None:
        """Lanes without texts free what only growing texts need."""
        for lane in list(self._running):
            if not lane.active and not any(where is lane for where, _ in self._waiting):
                lane.rest()
                self._running.remove(lane)


def _ends_of(model: Any, tokenizer: Any) -> list[int]:
    """What ends a text by the model's own generation config, and by its tokenizer."""
    of_config = getattr(model.generation_config, "eos_token_id", None)
    own = of_config if isinstance(of_config, list) else [of_config]
    ends = [*own, getattr(tokenizer, "eos_token_id", None)]
    return [int(token) for token in ends if token is not None]
