"""The bits of bf16: exact splitting, unbiased rounding, NaN and infinity left alone."""

from __future__ import annotations

import math

import pytest
import torch

from luthier.optim.rounding import join, split, stochastic_round


def random_floats(count: int) -> torch.Tensor:
    """fp32 values of every sign, exponent and mantissa, finite ones only."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=torch.Generator().manual_seed(3))
    values = bits.to(torch.int32).view(torch.float32)
    return values[torch.isfinite(values)]


def round_up_or_down(values: torch.Tensor, seed: int) -> torch.Tensor:
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    stochastic_round(values.clone(), rounded, torch.Generator().manual_seed(seed))
    return rounded


def split_apart(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, remainders = torch.empty_like(values, dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    split(values.clone(), weights, remainders)
    return weights, remainders


def test_a_bf16_weight_and_its_remainder_are_the_fp32_value() -> None:
    values = random_floats(200_000)
    weights, remainders = split_apart(values)
    assert torch.equal(join(weights.float(), remainders).view(torch.int32), values.view(torch.int32))


def test_the_bf16_half_is_the_nearest_one() -> None:
    values = random_floats(200_000)
    weights, _ = split_apart(values)
    nearest = values.bfloat16()
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~ties], nearest[~ties])


def test_rounding_hits_only_the_two_neighbours() -> None:
    values = random_floats(100_000)
    rounded = round_up_or_down(values, 0).view(torch.int16)
    below = (values.view(torch.int32) >> 16).to(torch.int16)  # toward zero, in steps of one bf16 digit
    assert torch.isin(rounded - below, torch.tensor([0, 1], dtype=torch.int16)).all()
    exact = (values.view(torch.int32) & 0xFFFF) == 0
    assert torch.equal(rounded[exact], below[exact])


@pytest.mark.parametrize("value", [1.0 + 2**-10, -0.3, 1e-3, 3.0e38, 1e-40, -7.1])
def test_rounding_is_right_on_average(value: float) -> None:
    count = 400_000
    exact = float(torch.tensor(value))  # as fp32
    rounded = round_up_or_down(torch.full((count,), value), 1).double()
    low, high = rounded.min().item(), rounded.max().item()
    share = (exact - low) / (high - low)
    deviation = (high - low) * math.sqrt(share * (1 - share) / count)
    assert abs(rounded.mean().item() - exact) < 5 * deviation


def test_random_bits_of_neighbours_are_independent() -> None:
    up = (round_up_or_down(torch.full((400_000,), 1.0 + 2**-8), 2) > 1).double() - 0.5  # halfway: up or down evenly
    for distance in (1, 2, 3, 4, 5, 8, 64):
        correlation = (up[:-distance] * up[distance:]).mean().item() * 4
        assert abs(correlation) < 5 / math.sqrt(len(up))


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_nan_and_infinity_pass(bits: int) -> None:
    special = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    values = torch.cat([special, torch.tensor([1.5, -2.25])])
    for rounded in (round_up_or_down(values, 4), split_apart(values)[0]):
        torch.testing.assert_close(rounded, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    weights, remainders = split_apart(values)
    torch.testing.assert_close(join(weights.float(), remainders), values, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_round() -> None:
    assert round_up_or_down(torch.empty(0), 0).numel() == 0
