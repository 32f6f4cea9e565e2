"""What the SDK calls a sample, as requests to the sampler, and the sampler's results as the SDK's response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from luthier.errors import ConfigError
from luthier.sampling.request import SamplingRequest, SamplingResult, is_whole
from luthier.tinker.rows import read_prompt
from luthier.tinker.types import SampledSequence, SampleResponse


def requests_of(
    model: Any,
    prompt: Any,
    samples: int,
    params: Any,
    *,
    prompt_logprobs: bool,
    topk_prompt_logprobs: int,
    topk_sample_logprobs: int,
    seed: int | None = None,
    adapter: str | None = None,
) -> list[SamplingRequest]:
    """A request for each sample; the first one tells of the prompt.

    Args:
        model: whose vocabulary and positions bound them.
        prompt: a ModelInput, a tensor or a list of token ids.
        samples: how many texts.
        params: `SamplingParams`, or anything with its attributes.
        prompt_logprobs: tell the log-probability of each token of the prompt.
        topk_prompt_logprobs, topk_sample_logprobs: tell so many likeliest tokens at each place.
        seed: where the params have none.
        adapter: whose weights.

    Raises:
        UserError: it cannot be sampled; what is wrong is named.
    """
    if not is_whole(samples) or samples < 1:
        raise ConfigError(f"{samples!r} is no number of texts", where="num_samples", remedy="give 1 or more")
    ids = ids_of(model, prompt)
    most = params.max_tokens
    if most is None:
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions is None:
            raise ConfigError("this model has no end of its positions", where="max_tokens", remedy="give a number")
        most = max(0, positions - len(ids))
    one = SamplingRequest(
        ids,
        max_tokens=most,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=seed if params.seed is None else params.seed,
        stop=params.stop,
        topk_logprobs=topk_sample_logprobs,
        adapter=adapter,
    )
    vocabulary = _vocabulary(model)
    if odd := sorted(token for token in one.stop_ids or () if not 0 <= token < vocabulary):
        what = f"token {odd[0]} is not among the model's {vocabulary:,}, and would end no text"
        raise ConfigError(what, where="stop", remedy="use the model's own tokenizer")
    first = replace(one, prompt_logprobs=prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs)
    return [first, *one.group(samples)[1:]]


def response_of(found: Sequence[SamplingResult], last: int | None) -> SampleResponse:
    """What came of the requests for the samples of one prompt.

    Args:
        found: the results, the first one's first.
        last: tell of so many tokens at the end of the prompt alone; None for all.

    Raises:
        ConfigError: the prompt has not so many tokens with one before them.
    """
    return SampleResponse(
        [SampledSequence(one.tokens, one.logprobs, one.stop_reason, one.topk) for one in found],
        last_of(found[0].prompt_logprobs, last),
        last_of(found[0].topk_prompt_logprobs, last),
    )


def ids_of(model: Any, prompt: Any) -> list[int]:
    """The tokens of a prompt.

    Raises:
        DataError: it is none, or has tokens that the model does not know.
    """
    return [int(token) for token in read_prompt(prompt, _vocabulary(model))]


def last_of(values: list[Any] | None, count: int | None) -> list[Any] | None:
    """The last so many values, None before them.

    Raises:
        ConfigError: there are not so many with one before them.
    """
    if count is None or values is None:
        return values
    if not is_whole(count) or not 1 <= count < max(len(values), 2):
        what = f"{count} is no number from 1 to {len(values) - 1}, the tokens that have one before them"
        raise ConfigError(what, where="prompt_logprobs_last_n")
    return [None] * (len(values) - count) + values[len(values) - count :]


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
