"""The worker's samplers: which weights each samples from, and the texts that grow on them, all in one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker import types

from luthier.errors import UserError
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingResult
from luthier.tinker.samples import requests_of, response_of
from luthier.tinker.server import wire

Outcome = tuple[str, "tuple[dict[str, Any], bytes] | UserError"]
"""Id of a request, and its result or what was wrong with it."""


@dataclass(slots=True)
class _Group:
    """The samples of one request.

    Attributes:
        id: of the request.
        numbers: of the samples in the engine.
        last: of how many positions of the prompt at its end log-probabilities are told.
        found: what has ended.
    """

    id: str
    numbers: Sequence[int]
    last: int | None
    found: dict[int, SamplingResult] = field(default_factory=dict)


class SamplerPool:
    """Samplers by name; None is the base model.

    Args:
        base: the base model.
        tokenizer: of all of them, or None.
        slots: how many texts grow side by side.
    """

    def __init__(self, base: Any, tokenizer: Any, *, slots: int) -> None:
        self._base = base
        self._engine = SamplingEngine(base, tokenizer=tokenizer, slots=slots)
        self._groups: dict[int, _Group] = {}
        """Of each sample that has not ended, the request that it is of."""

    @property
    def busy(self) -> bool:
        """Whether a text is growing or waiting to."""
        return self._engine.busy

    def add(self, name: str, model: Any) -> None:
        """Let a sampler be there, in the place of one of its name.

        Args:
            name: of it.
            model: whose weights, as they are at each step.
        """
        self.remove(name)
        self._engine.add(name, model)

    def remove(self, name: str) -> None:
        """Forget a sampler; texts that grow on it end as they would."""
        if name in self._engine.adapters:
            self._engine.remove(name)

    def submit(self, number: str, name: str | None, request: types.SampleRequest, seed: int) -> None:
        """Let a request join.

        Args:
            number: of the request.
            name: of the sampler.
            request: what is asked.
            seed: of its first sample, where it names none.

        Raises:
            UserError: it cannot be sampled; what is wrong is named.
        """
        asked = requests_of(
            self._base,
            request.prompt,
            request.num_samples,
            request.sampling_params,
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            seed=seed,
            adapter=name,
        )
        numbers: list[int] = []
        try:
            for sample in asked:
                numbers.append(self._engine.submit(sample))
        except UserError:
            for begun in numbers:
                self._engine.cancel(begun)
            raise
        group = _Group(number, numbers, request.prompt_logprobs_last_n)
        self._groups |= dict.fromkeys(numbers, group)

    def cancel(self, number: str) -> None:
        """Forget a request, whatever has become of it."""
        for group in {id(group): group for group in self._groups.values() if group.id == number}.values():
            self._forget(group)

    def step(self) -> list[Outcome]:
        """Let all texts grow by a token.

        Returns:
            the requests that have ended.
        """
        outcomes: list[Outcome] = []
        for number in self._engine.step():
            group = self._groups.get(number)
            if group is None:  # of a request of which another sample failed in this very step
                continue
            try:
                group.found[number] = self._engine.result(number)
                if len(group.found) < len(group.numbers):
                    continue
                outcome: tuple[dict[str, Any], bytes] | UserError = _answer(group)
            except UserError as error:
                outcome = error
            self._forget(group)
            outcomes.append((group.id, outcome))
        return outcomes

    def _forget(self, group: _Group) -> None:
        for number in group.numbers:
            self._groups.pop(number, None)
            if number not in group.found:
                self._engine.cancel(number)


def _answer(group: _Group) -> tuple[dict[str, Any], bytes]:
    found = [group.found[number] for number in group.numbers]
    told = {"media": wire.PROTOBUF, "tokens": sum(len(one.tokens) for one in found)}
    return told, wire.sample_response(response_of(found, group.last))
