"""What is asked of the sampler, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from luthier.errors import ConfigError

TopTokens = list[tuple[int, float]]
"""Likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One text to be gone on with.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: at most so many new ones; 0 reads the prompt alone.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the so many likeliest tokens, and those as likely as the last of them; -1 or 0 for no limit.
        top_p: only the likeliest tokens that together have this probability.
        seed: the text depends on it and on the prompt alone, not on what else is sampled; None draws one.
        stop: what ends a text, all of it: token ids or strings (which need a tokenizer). Empty: nothing does. None: the
            model's own ends of a text. The ending belongs to the text.
        prompt_logprobs: also give the log-probability of each token of the prompt.
        topk_prompt_logprobs: also give so many likeliest tokens at each place of the prompt.
        topk_logprobs: also give so many likeliest tokens at each place of the text.
        adapter: the name of one that was added to the engine; None for the engine's own model as it is.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[int] | Sequence[str] | str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        for field in ("max_tokens", "top_k", "topk_logprobs", "topk_prompt_logprobs", "seed"):
            value = getattr(self, field)
            if not is_whole(value) and not (field == "seed" and value is None):
                raise ConfigError(f"{value!r} is no whole number", where=field)
        for field in ("temperature", "top_p"):
            if isinstance(value := getattr(self, field), bool) or not isinstance(value, Real):
                raise ConfigError(f"{value!r} is no number", where=field)
        object.__setattr__(self, "stop", _stops(self.stop))
        bounds = {
            "prompt": (len(self.prompt) > 0, "has no token", "give at least one, a BOS for instance"),
            "max_tokens": (self.max_tokens >= 0, "is negative", "give 0 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "is no temperature", "give 0 or more"),
            "top_k": (self.top_k >= -1, "is no number of tokens", "give -1 for no limit"),
            "top_p": (0 < self.top_p <= 1, "is no probability", "give more than 0 and at most 1"),
            "topk_logprobs": (self.topk_logprobs >= 0, "is negative", "give 0 or more"),
            "topk_prompt_logprobs": (self.topk_prompt_logprobs >= 0, "is negative", "give 0 or more"),
        }
        for field, (holds, what, remedy) in bounds.items():
            if not holds:
                value = "the prompt" if field == "prompt" else f"{getattr(self, field)}"
                raise ConfigError(f"{value} {what}", where=field, remedy=remedy)

    @property
    def stop_ids(self) -> frozenset[int] | None:
        """Ids that end the text; None where the model's own do."""
        if self.stop is None:
            return None
        return frozenset(entry for entry in self.stop if isinstance(entry, int))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the text."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(entry for entry in self.stop or () if isinstance(entry, str))

    def group(self, samples: int) -> list[SamplingRequest]:
        """So many samples of one prompt, which is read once; sample i has seed + i."""
        return [replace(self, seed=None if self.seed is None else self.seed + i) for i in range(samples)]


@dataclass(slots=True)
class SamplingResult:
    """A text that has ended.

    Log-probabilities of new tokens are those of the distribution that they were sampled from: of the logits divided by
    the temperature, over the tokens that top-k and top-p leave. With temperature 0, which samples from none, they are
    those of the model's own distribution (temperature 1, nothing left out). Those of the prompt are that in any case.

    Attributes:
        tokens: new ids, the stop token or the tokens of the stop string included.
        logprobs: one for each of them.
        stop_reason: "stop" where an end was met, "length" where there was no room for more.
        topk: for each new token what was likeliest; None if not asked for. Fewer where fewer could be sampled.
        prompt_logprobs: for each token of the prompt, None for the first; None if not asked for.
        topk_prompt_logprobs: for each token of the prompt what was likeliest in its place, None for the first; None if
            not asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk: list[TopTokens] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[TopTokens | None] | None = None


def is_whole(value: object) -> bool:
    """Whether it is a whole number, numpy's included; true and false are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _stops(given: Any) -> list[int | str] | str | None:
    """What ends a text, of whatever holds it: what is neither a token nor text would end none, and nobody would know.

    Raises:
        ConfigError: something is neither.
    """
    if given is None or isinstance(given, str):
        entries: Any = [] if given is None else [given]
    elif not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise ConfigError(f"{given!r} is no list", where="stop", remedy="give a list of token ids or strings")
    else:
        entries = given.tolist() if hasattr(given, "tolist") else list(given)  # an array's, a tensor's
    for entry in entries:
        if not is_whole(entry) and not isinstance(entry, str):
            raise ConfigError(f"{entry!r} is neither a token id nor a string", where="stop")
        if isinstance(entry, str) and any("\ud800" <= letter <= "\udfff" for letter in entry):
            raise ConfigError(f"{entry!r} holds half a character, which no text has", where="stop")
    if given is None or isinstance(given, str):
        return given
    return [entry if isinstance(entry, str) else int(entry) for entry in entries]
