"""The worker's samplers: which weights each samples from, and the texts that grow on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinker import types

from luthier.errors import DataError, NonFiniteError, UserError
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest, SamplingResult
from luthier.tinker.rows import read_prompt
from luthier.tinker.sampler import snapshot
from luthier.tinker.server import wire
from luthier.tinker.types import SampledSequence, SampleResponse

Outcome = tuple[str, "tuple[dict[str, Any], bytes] | UserError"]
"""Id of a request, and its result or what was wrong with it."""


@dataclass(slots=True)
class _Group:
    """The samples of one request.

    Attributes:
        id: of the request.
        engine: where they grow.
        numbers: of the samples there.
        last: of how many positions of the prompt at its end log-probabilities are told.
        found: what has ended.
    """

    id: str
    engine: SamplingEngine
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
        self._tokenizer = tokenizer
        self._slots = slots
        self._vocabulary = int(base.get_input_embeddings().weight.shape[0])
        self._positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        self._engines: dict[str | None, SamplingEngine] = {None: self._engine(base)}
        self._groups: dict[str, _Group] = {}

    @property
    def busy(self) -> bool:
        """Whether a text is growing or waiting to."""
        return bool(self._groups)

    def add(self, name: str, model: Any, *, live: bool) -> None:
        """Let a sampler be there.

        Args:
            name: of it.
            model: whose weights.
            live: sample from the model itself, whatever becomes of it; otherwise from how it is now.
        """
        self._engines[name] = self._engine(model if live else snapshot(model))

    def remove(self, name: str) -> None:
        """Forget a sampler; texts that grow on it end as they would."""
        self._engines.pop(name, None)

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
        engine, params = self._engines[name], request.sampling_params
        ids = [int(token) for token in read_prompt(request.prompt, self._vocabulary)]
        most = params.max_tokens
        if most is None:
            if self._positions is None:
                raise DataError("this model has no end of its positions", where="max_tokens", remedy="give a number")
            most = max(0, self._positions - len(ids))
        one = SamplingRequest(
            ids,
            max_tokens=most,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seed if params.seed is None else params.seed,
            stop=params.stop,
            topk_logprobs=request.topk_sample_logprobs,
        )
        told = bool(request.prompt_logprobs)
        first = replace(one, prompt_logprobs=told, topk_prompt_logprobs=request.topk_prompt_logprobs)
        numbers: list[int] = []
        try:
            for sample in [first, *one.group(request.num_samples)[1:]]:
                numbers.append(engine.submit(sample))
        except UserError:
            for begun in numbers:
                engine.cancel(begun)
            raise
        self._groups[number] = _Group(number, engine, numbers, request.prompt_logprobs_last_n)

    def cancel(self, number: str) -> None:
        """Forget a request, whatever has become of it."""
        group = self._groups.pop(number, None)
        for one in group.numbers if group is not None else ():
            if group is not None and one not in group.found:
                group.engine.cancel(one)

    def step(self) -> list[Outcome]:
        """Let all texts grow by a token.

        Returns:
            the requests that have ended.
        """
        outcomes: list[Outcome] = []
        for engine in {id(group.engine): group.engine for group in self._groups.values()}.values():
            try:
                ended = engine.step()
            except NonFiniteError as error:  # the engine has forgotten all of them
                broken = [group.id for group in self._groups.values() if group.engine is engine]
                for number in broken:
                    del self._groups[number]
                    outcomes.append((number, error))
                continue
            for group in [group for group in self._groups.values() if group.engine is engine]:
                for one in set(group.numbers) & set(ended):
                    group.found[one] = engine.result(one)
                if len(group.found) == len(group.numbers):
                    del self._groups[group.id]
                    outcomes.append((group.id, _answer(group)))
        return outcomes

    def _engine(self, model: Any) -> SamplingEngine:
        return SamplingEngine(model, tokenizer=self._tokenizer, slots=self._slots)


def _answer(group: _Group) -> tuple[dict[str, Any], bytes]:
    found = [group.found[number] for number in group.numbers]
    response = SampleResponse(
        [SampledSequence(one.tokens, one.logprobs, one.stop_reason, one.topk) for one in found],
        found[0].prompt_logprobs,
        found[0].topk_prompt_logprobs,
    )
    told = {"media": wire.PROTOBUF, "tokens": sum(len(one.tokens) for one in found)}
    return told, wire.sample_response(response, last=group.last)
