"""`luthier generate` and `luthier chat`: what a model answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.config import GenerationConfig, RunConfig
from luthier.data.mask import Masker
from luthier.hf.render import Encoder
from luthier.hf.tokenizer import chat_template_of, encode_text, render, stop_token_ids
from luthier.recipes.setup import inference_network, prepare_process, tokenizer_of
from luthier.sampling.engine import SLOTS, SamplingEngine
from luthier.sampling.request import SamplingRequest

Message = Mapping[str, Any]


def generate(config: RunConfig, prompts: Sequence[str], *, adapter: Path | None = None) -> dict[str, Any]:
    """Answer prompts, as a user's turn where the model has a chat template, else as text to go on with.

    Args:
        config: names the model and how to sample (`generation`).
        prompts: texts.
        adapter: a directory of PEFT files to put on the model.

    Returns:
        `answers`: a list of prompt, text and how many tokens it has.
    """
    device = prepare_process(config)
    tokenizer = tokenizer_of(config, adapter)
    model = inference_network(config, device, adapter).model
    found = answers(model, tokenizer, prompts, config.generation, seed=config.seed)
    told = [
        {"prompt": prompt, "text": text, "tokens": count} for prompt, (text, count) in zip(prompts, found, strict=True)
    ]
    return {"model": config.model, "adapter": str(adapter) if adapter else None, "answers": told}


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], config: GenerationConfig, *, seed: int = 0
) -> list[tuple[str, int]]:
    """Answers to prompts, side by side, and their lengths in tokens; prompt i is sampled by seed + i."""
    stops = stops_of(model, tokenizer)
    engine = SamplingEngine(model, slots=max(1, min(SLOTS, len(prompts))), stop_token_ids=stops)
    requests = []
    for number, prompt in enumerate(prompts):
        if chat_template_of(tokenizer) is None:
            ids = encode_text(tokenizer, prompt)
        else:
            ids = render(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
        requests.append(_request(ids, config, seed + number))
    found = [_without_end(result.tokens, stops) for result in engine.sample(requests)]
    return [(str(tokenizer.decode(new, skip_special_tokens=True)).strip(), len(new)) for new in found]


def answer(model: Any, tokenizer: Any, prompt: str, config: GenerationConfig, *, seed: int = 0) -> tuple[str, int]:
    """One answer and its length in tokens."""
    return answers(model, tokenizer, [prompt], config, seed=seed)[0]


def _request(ids: Sequence[int], config: GenerationConfig, seed: int | None) -> SamplingRequest:
    return SamplingRequest(
        ids,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=seed,
    )


def _without_end(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Tokens without the one that ended them."""
    return list(tokens[:-1] if tokens and tokens[-1] in stops else tokens)


def stops_of(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that generation stops on: those that the template ends an assistant turn with, and the model's own."""
    ends: Sequence[int] = ()
    if chat_template_of(tokenizer) is not None:
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
        ends = sorted(Masker(Encoder(tokenizer))(talk, None, [0.0, 1.0]).stops)
    return stop_token_ids(tokenizer, model.generation_config, ends)


def open_chat(config: RunConfig, *, adapter: Path | None = None) -> Callable[[Sequence[Message]], Iterator[str]]:
    """A model to talk with.

    Returns:
        reply(messages) -> pieces of the answer as they are made.
    """
    device = prepare_process(config)
    tokenizer = tokenizer_of(config, adapter)
    model = inference_network(config, device, adapter).model
    stops = stops_of(model, tokenizer)
    engine = SamplingEngine(model, slots=1, stop_token_ids=stops)

    def reply(messages: Sequence[Message]) -> Iterator[str]:
        ids = render(tokenizer, messages, add_generation_prompt=True)
        tokens: list[int] = []
        told = 0
        for token in engine.stream(_request(ids, config.generation, None)):
            tokens.append(token)
            text = str(tokenizer.decode(_without_end(tokens, stops), skip_special_tokens=True))
            # a word may go on, and a character may be cut between two tokens
            whole = max(text.rfind(" "), text.rfind("\n")) + 1
            if whole > told:
                yield text[told:whole]
                told = whole
        if rest := str(tokenizer.decode(_without_end(tokens, stops), skip_special_tokens=True))[told:]:
            yield rest

    return reply
