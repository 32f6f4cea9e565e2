"""Tokens come as often as the float64 distribution says, from the sets that Transformers would leave."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from luthier.sampling.choose import choose, filtered, uniform
from luthier.sampling.request import SamplingRequest

HOW = [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 12}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.9}]


def expected(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[vocabulary] probabilities, by Transformers' own filters in float64."""
    scores = TemperatureLogitsWarper(temperature)(torch.empty(0), logits.double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(torch.empty(0), scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.empty(0), scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_frequencies_are_those_of_the_distribution(how: dict[str, float]) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(0)) * 1.5
    truth = expected(logits, **how)
    request = SamplingRequest([1], 1, topk_logprobs=60, **how)
    count = 4000
    choices = choose(logits.expand(count, -1), [request] * count, [uniform(seed, 7) for seed in range(count)])
    for choice in choices[:50]:
        assert choice.logprob == pytest.approx(float(truth[choice.token].log()), abs=1e-5)
    top = dict(choices[0].top)
    assert {token for token, _ in choices[0].top} == set(truth.nonzero().flatten().tolist())
    assert top == pytest.approx({token: float(truth[token].log()) for token in top}, abs=1e-5)
    seen = torch.bincount(torch.tensor([choice.token for choice in choices]), minlength=60).double()
    assert not seen[truth == 0].any()
    often = truth * count >= 5
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    wanted = torch.cat([truth[often], truth[~often].sum()[None]]) * count
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = float(((seen - wanted).square() / wanted).sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # about one seed in ten thousand fails


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.99])
def test_top_p_of_a_flat_distribution_looks_at_as_much_as_it_takes(top_p: float) -> None:
    logprobs = (torch.randn(9000, generator=torch.Generator().manual_seed(1)) * 0.3).log_softmax(-1)
    ids, kept = filtered(logprobs, -1, top_p)
    truth = expected(logprobs, top_p=top_p)
    differing = set(ids.tolist()) ^ set(truth.nonzero().flatten().tolist())
    assert len(differing) <= 1  # the token at the border, by rounding
    assert float(kept.double().exp().sum()) == pytest.approx(1, abs=1e-4)


def test_small_temperatures_and_the_greedy_limit() -> None:
    logits = torch.tensor([[3.0, 9.0, 9.5, -1e30]])
    for temperature in (0.0, 1e-300, 1e-40, 1e-30, 1e-4):
        request = SamplingRequest([1], 1, temperature=temperature)
        assert choose(logits, [request], [0.999])[0].token == 2
    assert choose(logits, [SamplingRequest([1], 1, temperature=0)], [0.0])[0].logprob == pytest.approx(
        float(logits[0].log_softmax(-1)[2])
    )
    assert choose(logits, [SamplingRequest([1], 1, temperature=1e-4)], [0.0])[0].logprob == pytest.approx(0)
    masked = torch.tensor([[1.0, 2.0, -torch.inf]])
    hot = choose(masked, [SamplingRequest([1], 1, temperature=1e300)], [0.0])[0]
    assert (hot.token, hot.logprob) == (0, pytest.approx(-math.log(2)))
