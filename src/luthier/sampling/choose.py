"""From logits to tokens: temperature, top-k, top-p, and one uniform number for each token.

Every row is treated by itself, so a token does not depend on the batch that it was sampled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luthier.sampling.request import SamplingRequest, TopTokens

_FIRST_LOOK = 256
"""Tokens that top-p looks at before it looks at more: a whole vocabulary takes long to sort."""

_BLOCK = 64
"""Neighbours in the vocabulary that are looked at together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability, and what was likeliest in its place."""

    token: int
    logprob: float
    top: TopTokens


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) that decides about a token; a hash, so that it needs no state.

    >>> uniform(0, 0) == uniform(0, 0), uniform(0, 0) == uniform(0, 1), 0 <= uniform(1, 2) < 1
    (True, False, True)
    """
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / float(1 << 52)


def choose(logits: Tensor, requests: Sequence[SamplingRequest], uniforms: Sequence[float]) -> list[Choice]:
    """A token for each row.

    The token is the first whose cumulative probability, in the order of the vocabulary, exceeds the uniform number.

    Args:
        logits: [n, vocabulary], any floating dtype; worked on in fp32, or float64 if they are that.
        requests: how each row is sampled.
        uniforms: one for each row, in [0, 1).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    least, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # 0 and infinity would give NaN
    temperatures = [
        min(max(float(request.temperature), least), most) if request.temperature else 1.0 for request in requests
    ]
    if any(temperature != 1.0 for temperature in temperatures):
        # the largest becomes 0 first, so that a small temperature makes no infinity of it
        scaled = wide - wide.amax(-1, keepdim=True)
        wide_or_scaled = scaled / torch.tensor(temperatures, dtype=wide.dtype, device=wide.device)[:, None]
        own = torch.tensor([temperature != 1.0 for temperature in temperatures], device=wide.device)[:, None]
        logprobs = torch.where(own, wide_or_scaled, wide).log_softmax(-1)
    else:
        logprobs = wide.log_softmax(-1)
    greedy = likeliest(wide).tolist()
    plain = [row for row, request in enumerate(requests) if request.temperature and not _filters(request, logits)]
    tokens = dict(zip(plain, _inverse_cdf(logprobs, plain, uniforms), strict=True))
    tokens |= {row: greedy[row] for row, request in enumerate(requests) if not request.temperature}
    places_of = torch.tensor([tokens.get(row, 0) for row in range(len(requests))], device=wide.device)
    told = logprobs.gather(-1, places_of[:, None])[:, 0].tolist()
    found = []
    for row, request in enumerate(requests):
        if row not in tokens:
            ids, kept = filtered(logprobs[row], request.top_k, request.top_p)
            place = _inverse_cdf(kept[None], [0], [uniforms[row]])[0]
            top = _top(kept, request.topk_logprobs, ids)
            found.append(Choice(int(ids[place]), float(kept[place]), top))
            continue
        found.append(Choice(tokens[row], told[row], _top(logprobs[row], request.topk_logprobs)))
    return found


def likeliest(logits: Tensor) -> Tensor:
    """`argmax` of each row, the first of equals, by maxima of blocks: those are several times as fast on the CPU.

    Args:
        logits: [n, vocabulary].

    Returns:
        int64 [n].
    """
    count = logits.shape[-1] // _BLOCK
    if not count:
        return logits.argmax(-1)
    maxima = logits[:, : count * _BLOCK].unflatten(-1, (count, _BLOCK)).amax(-1)
    if rest := logits.shape[-1] - count * _BLOCK:
        maxima = torch.cat([maxima, logits[:, -rest:].amax(-1, keepdim=True)], -1)
    inside = torch.arange(_BLOCK, device=logits.device)
    ids = (maxima.argmax(-1, keepdim=True) * _BLOCK + inside).clamp_(max=logits.shape[-1] - 1)
    return ids.gather(-1, logits.gather(-1, ids).argmax(-1, keepdim=True))[:, 0]


def _filters(request: SamplingRequest, logits: Tensor) -> bool:
    return request.top_p < 1 or 0 < request.top_k < logits.shape[-1]


def filtered(logprobs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens that are left, and their log-probabilities among one another.

    As Transformers filters: first top-k, then top-p of what is left; the token that reaches `top_p` stays.

    Args:
        logprobs: [vocabulary].
        top_k: number of tokens, ties of the last kept; below 1 for no limit.
        top_p: probability.

    Returns:
        ids [m] in the order of the vocabulary, log-probabilities [m].
    """
    ids = torch.arange(len(logprobs), device=logprobs.device)
    if 0 < top_k < len(logprobs):
        ids = (logprobs >= logprobs.topk(top_k).values[-1]).nonzero().squeeze(-1)
    kept = logprobs[ids].log_softmax(-1)
    if top_p < 1:
        width = _FIRST_LOOK
        while True:
            width = min(width, len(kept))
            best, order = kept.topk(width)
            mass = best.double().exp().cumsum(-1)
            if width == len(kept) or float(mass[-1]) >= top_p:
                break
            width *= 16
        count = 1 + int((mass[:-1] < top_p).sum())
        chosen = order[:count].sort().values
        ids, kept = ids[chosen], kept[chosen].log_softmax(-1)
    return ids, kept


def _inverse_cdf(logprobs: Tensor, rows: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """The places that uniform numbers [one for each row of logprobs] fall on, for some rows."""
    if not rows:
        return []
    chosen = logprobs if len(rows) == len(logprobs) else logprobs[list(rows)]
    mass = chosen.exp().cumsum(-1, dtype=torch.float64)
    targets = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64, device=mass.device)[:, None]
    places = torch.searchsorted(mass, targets * mass[:, -1:], right=True)
    # a NaN gets the last place, whose log-probability tells
    return [int(place) for place in places.clamp(max=logprobs.shape[-1] - 1).flatten()]


def _top(logprobs: Tensor, count: int, ids: Tensor | None = None) -> TopTokens:
    if not count:
        return []
    best = logprobs.topk(min(count, len(logprobs)))
    places = best.indices if ids is None else ids[best.indices]
    return list(zip(places.tolist(), best.values.tolist(), strict=True))


def of_prompt(logits: Tensor, targets: Tensor, count: int) -> tuple[list[float], list[TopTokens]]:
    """Log-probabilities of the tokens that a prompt has, and what was likeliest in their places.

    Args:
        logits: [n, vocabulary].
        targets: int64 [n].
        count: how many of the likeliest.
    """
    logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    told: list[float] = logprobs.gather(-1, targets[:, None]).squeeze(-1).tolist()
    return told, [_top(row, count) for row in logprobs]
