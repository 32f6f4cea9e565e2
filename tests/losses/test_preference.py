"""Losses of preferences against their formulas in float64, and their gradients against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from luthier.losses import preference

CHOSEN = torch.tensor([0.3, -2.0, 5.0, 0.0], dtype=torch.float64)
REJECTED = torch.tensor([-0.4, 1.5, 0.0, 0.0], dtype=torch.float64)
TOKENS = (torch.tensor([3.0, 5.0, 1.0, 2.0]).double(), torch.tensor([2.0, 7.0, 4.0, 2.0]).double())


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


FORMULAS: dict[str, Any] = {
    "sigmoid": lambda m, c, r, b, e: -(1 - e) * math.log(sigma(b * m)) - e * math.log(sigma(-b * m)),
    "hinge": lambda m, c, r, b, e: max(0.0, 1 - b * m),
    "ipo": lambda m, c, r, b, e: (c - r - 1 / (2 * b)) ** 2,
    "robust": lambda m, c, r, b, e: (-(1 - e) * math.log(sigma(b * m)) + e * math.log(sigma(-b * m))) / (1 - 2 * e),
}


@pytest.mark.parametrize("loss", FORMULAS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula(loss: Any, smoothing: float) -> None:
    found = preference.dpo(CHOSEN, REJECTED, beta=0.3, loss=loss, label_smoothing=smoothing, lengths=TOKENS)
    for index, value in enumerate(found.tolist()):
        c, r = float(CHOSEN[index]), float(REJECTED[index])
        mean = c / float(TOKENS[0][index]), r / float(TOKENS[1][index])
        assert value == pytest.approx(FORMULAS[loss](c - r, *mean, 0.3, smoothing), rel=1e-12)


def test_simpo_and_odds_ratio_are_their_formulas() -> None:
    chosen, rejected = -CHOSEN.abs() - 0.1, -REJECTED.abs() - 0.01
    found = preference.simpo(chosen, rejected, beta=2.0, gamma=0.5)
    ratio = preference.odds_ratio(chosen, rejected)
    for index in range(4):
        c, r = float(chosen[index]), float(rejected[index])
        assert float(found[index]) == pytest.approx(-math.log(sigma(2.0 * (c - r) - 0.5)), rel=1e-12)
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
        assert float(ratio[index]) == pytest.approx(-math.log(sigma(math.log(odds[0] / odds[1]))), rel=1e-10)


def test_kto_is_its_formula() -> None:
    good = torch.tensor([True, False, True, False])
    found = preference.kto(CHOSEN, good, torch.tensor(0.7), beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    for gain, label, value in zip(CHOSEN.tolist(), good.tolist(), found.tolist(), strict=True):
        wanted = 1.5 * (1 - sigma(0.3 * (gain - 0.7))) if label else 0.5 * (1 - sigma(0.3 * (0.7 - gain)))
        assert value == pytest.approx(wanted, rel=1e-6)
    assert preference.kl_estimate(-3.0, 2) == preference.kl_estimate(0.0, 0) == 0.0
    assert preference.kl_estimate(3.0, 2) == 1.5


def test_gradients_are_those_of_finite_differences() -> None:
    chosen = (-CHOSEN.abs() - 0.1).requires_grad_(True)
    rejected = (-REJECTED.abs() - 0.3).requires_grad_(True)
    for loss in ("sigmoid", "robust", "ipo"):
        assert torch.autograd.gradcheck(
            lambda c, r, loss=loss: preference.dpo(c, r, beta=0.3, loss=loss, label_smoothing=0.1, lengths=TOKENS),
            (chosen, rejected),
        )
    assert torch.autograd.gradcheck(preference.odds_ratio, (chosen, rejected))


def test_odds_of_certainty_have_a_finite_gradient() -> None:
    value = torch.tensor([-1e-9, -50.0], dtype=torch.float64, requires_grad=True)
    preference.odds_ratio(value, value.detach() - 1.0).sum().backward()
    assert value.grad is not None
    assert bool(torch.isfinite(value.grad).all())


def test_sums_over_documents_count_what_has_a_weight() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0])
    found = preference.document_sums(values, weights, torch.tensor([0, 2, 4], dtype=torch.int32))
    assert found.tolist() == [1.0, 7.0]
