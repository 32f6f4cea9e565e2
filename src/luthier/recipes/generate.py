"""`luthier generate` and `luthier chat`: what a model answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.config import GenerationConfig, RunConfig
from luthier.data.mask import Masker
from luthier.hf.render import Encoder
from luthier.hf.tokenizer import chat_template_of, encode_text, render, stop_token_ids, text_streamer
from luthier.recipes.setup import inference_network, prepare_process, tokenizer_of
from luthier.sampling.generate import generate_ids

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
    tokenizer = tokenizer_of(config)
    model = inference_network(config, device, adapter).model
    answers = []
    for number, prompt in enumerate(prompts):
        text, count = answer(model, tokenizer, prompt, config.generation, seed=config.seed + number)
        answers.append({"prompt": prompt, "text": text, "tokens": count})
    return {"model": config.model, "adapter": str(adapter) if adapter else None, "answers": answers}


def answer(model: Any, tokenizer: Any, prompt: str, config: GenerationConfig, *, seed: int = 0) -> tuple[str, int]:
    """One answer and its length in tokens."""
    if chat_template_of(tokenizer) is None:
        ids = encode_text(tokenizer, prompt)
    else:
        ids = render(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    new = generate_ids(model, ids, config, stop_token_ids=stops_of(model, tokenizer), seed=seed)
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip(), len(new)


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
    tokenizer = tokenizer_of(config)
    model = inference_network(config, device, adapter).model
    stops = stops_of(model, tokenizer)

    def reply(messages: Sequence[Message]) -> Iterator[str]:
        ids = render(tokenizer, messages, add_generation_prompt=True)
        streamer = text_streamer(tokenizer)
        failure: list[BaseException] = []

        def work() -> None:
            try:
                generate_ids(model, ids, config.generation, stop_token_ids=stops, streamer=streamer)
            except BaseException as error:  # told in the thread that reads
                failure.append(error)
                streamer.end()

        worker = threading.Thread(target=work, name="generate", daemon=True)
        worker.start()
        yield from streamer
        worker.join()
        if failure:
            raise failure[0]

    return reply
