"""Completions by Transformers' own `generate`, ended by the stop tokens that were trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from luthier.config import GenerationConfig


@torch.no_grad()
def generate_ids(
    model: Any,
    prompt: Sequence[int],
    config: GenerationConfig,
    *,
    stop_token_ids: Sequence[int],
    pad_token_id: int | None = None,
    streamer: Any = None,
    seed: int | None = None,
) -> list[int]:
    """Continue one prompt.

    Args:
        model: a Transformers model, adapters in place or not; put into evaluation mode meanwhile.
        prompt: token ids, at least one.
        config: how to sample; temperature 0 takes the likeliest token.
        stop_token_ids: generation ends with the first of these, which is not returned.
        pad_token_id: only silences Transformers; one prompt needs no padding.
        streamer: one of Transformers' streamers, fed token by token.
        seed: of this call's sampling; the process' generator goes on where it was when left out.

    Returns:
        the new ids without the prompt and without the stop token.
    """
    was_training = model.training
    model.eval()
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        options |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    else:
        options |= {"temperature": None, "top_p": None, "top_k": None}
    stops = sorted(set(stop_token_ids))
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    try:
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=stops or None,
                pad_token_id=pad_token_id if pad_token_id is not None else (stops[0] if stops else 0),
                streamer=streamer,
                **options,
            )
    finally:
        model.train(was_training)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new[:-1] if new and new[-1] in stops else new
