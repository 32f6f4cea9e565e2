"""Sampling from a client's weights, the live ones or a snapshot of them in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from luthier.errors import ConfigError
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest
from luthier.tinker.futures import APIFuture, gives_future, gives_result
from luthier.tinker.samples import ids_of, last_of, requests_of, response_of
from luthier.tinker.types import SampleResponse, SamplingParams


class SamplingClient:
    """Samples from one model.

    Args:
        model: whose weights are read at every call.
        tokenizer: gives the tokenizer, or None where there is none; asked for when it is needed first.
        base_model: what `luthier train` calls the base.
        seed: of what is sampled without a seed; unpredictable when left out.
    """

    def __init__(self, model: Any, tokenizer: Callable[[], Any], base_model: str = "", seed: int | None = None) -> None:
        self.model = model
        self._seed = seed
        self._tokenizer = tokenizer
        self._base_model = base_model
        self._engine: SamplingEngine | None = None

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: Any = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Go on with a prompt.

        Args:
            prompt: a ModelInput, a tensor or a list of token ids.
            num_samples: how many texts; the prompt is read once.
            sampling_params: `SamplingParams`, or anything with its attributes.
            include_prompt_logprobs: also give the log-probability of each token of the prompt.
            topk_prompt_logprobs: also give so many likeliest tokens at each place of the prompt.
            topk_sample_logprobs: also give so many likeliest tokens at each place of the texts.
            target_prompt_logprobs, prompt_alt_tokens_k: are refused; `forward` takes several targets a place.
            prompt_logprobs_last_n: of the prompt's log-probabilities give the last so many, None for the others.
        """

        def work() -> SampleResponse:
            if target_prompt_logprobs is not None or prompt_alt_tokens_k:
                name = "prompt_alt_tokens_k" if prompt_alt_tokens_k else "target_prompt_logprobs"
                remedy = "give forward a Datum whose target_tokens are [T, K]"
                raise ConfigError("there is no such thing here", where=name, remedy=remedy)
            found = self.engine.sample(
                requests_of(
                    self.model,
                    prompt,
                    num_samples,
                    SamplingParams() if sampling_params is None else sampling_params,
                    prompt_logprobs=include_prompt_logprobs,
                    topk_prompt_logprobs=topk_prompt_logprobs,
                    topk_sample_logprobs=topk_sample_logprobs,
                )
            )
            return response_of(found, prompt_logprobs_last_n)

        return APIFuture(work)

    def compute_logprobs(self, prompt: Any, prompt_logprobs_last_n: int | None = None) -> APIFuture[list[float | None]]:
        """The log-probability of every token of a prompt after those before it, None for the first.

        Args:
            prompt: a ModelInput, a tensor or a list of token ids.
            prompt_logprobs_last_n: give the last so many, None for the others.
        """

        def work() -> list[float | None]:
            request = SamplingRequest(ids_of(self.model, prompt), max_tokens=0, prompt_logprobs=True)
            return last_of(self.engine.sample([request])[0].prompt_logprobs, prompt_logprobs_last_n) or []

        return APIFuture(work)

    def get_base_model(self) -> str:
        """What `luthier train` calls the base model."""
        return self._base_model

    def get_tokenizer(self) -> Any:
        """The tokenizer that belongs to the model."""
        return self._tokenizer()

    sample_async = gives_result(sample)
    compute_logprobs_async = gives_result(compute_logprobs)
    get_base_model_async = gives_future(get_base_model)

    @property
    def engine(self) -> SamplingEngine:
        """What samples; made when it is needed first."""
        if self._engine is None:
            self._engine = SamplingEngine(self.model, tokenizer=self._tokenizer(), seed=self._seed)
        return self._engine


def snapshot(model: Any) -> Any:
    """A model that stays as this one is now: what trains is copied, what is frozen is shared."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in [*frozen, *model.buffers()]})
    return copied.requires_grad_(False)


def refuse_stability(asked: bool) -> None:
    """Raise where what only stable_reinforce reads is to be recorded.

    Raises:
        ConfigError: it is.
    """
    if asked:
        what = "it is for stable_reinforce, which is not offered"
        raise ConfigError(what, where="record_stability_info", remedy="leave it out")
