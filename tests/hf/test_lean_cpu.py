"""The compiled loops of a lean step, against float64 formulas and PyTorch's own attention in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from luthier.hf.decoding.lean_cpu import Attention, CompiledBetween
from luthier.hf.decoding.lean_ops import Layer, Places, PlainBetween

NEAR = {"rtol": 2e-6, "atol": 2e-6}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def norm(size: int) -> Qwen3RMSNorm:
    made = Qwen3RMSNorm(size, eps=1e-5)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    return made


def layer(queries: Any = None, keys: Any = None) -> Layer:
    return Layer(norm(8), norm(8), queries, keys, nn.SiLU(), 0.3)


@pytest.fixture(params=[CompiledBetween, PlainBetween])
def between(request: pytest.FixtureRequest) -> Any:
    return lambda dim, queries, keys: request.param(Places(random(5, dim), random(5, dim, scale=0.5), queries, keys))


@pytest.mark.parametrize("hidden", [1, 7, 64, 100])
def test_norms_are_those_of_the_formula(between: Any, hidden: int) -> None:
    x, more, own = random(5, hidden, scale=3), random(5, hidden), norm(hidden)

    def formula(wide: Tensor) -> Tensor:
        return own.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    with torch.no_grad():
        step = between(4, 1, 1)
        expected = formula(x.double())
        torch.testing.assert_close(step.normed(own, x).double(), expected, **NEAR)
        expected, whole = formula(x.double() + more.double()), x + more
        added, found = step.added(x.clone(), more.clone(), own)
    assert torch.equal(added, whole)
    torch.testing.assert_close(found.double(), expected, **NEAR)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 1, 2), (6, 2, 24), (4, 4, 64)])
def test_queries_and_keys_are_turned_and_values_left(
    between: Any, queries: int, keys: int, dim: int, with_norms: bool
) -> None:
    made, own = random(5, queries + 2 * keys, dim), (norm(dim), norm(dim)) if with_norms else (None, None)
    wide = made.double()
    cos, sin = (table.double()[:, None] for table in (random(5, dim), random(5, dim, scale=0.5)))
    with torch.no_grad():
        if own[0] is not None and own[1] is not None:
            parts = wide.split((queries, keys, keys), 1)
            wide = torch.cat([own[0].double()(parts[0]), own[1].double()(parts[1]), parts[2]], 1)
            own[0].float(), own[1].float()
        turned = wide[:, : queries + keys]
        expected = torch.cat([turned * cos + rotate_half(turned) * sin, wide[:, queries + keys :]], 1)
        between(dim, queries, keys).turned(layer(*own), made)
    torch.testing.assert_close(made.double(), expected, **NEAR)


@pytest.mark.parametrize("inner", [1, 3, 40, 1000])
def test_gates_are_silu(between: Any, inner: int) -> None:
    both = random(5, 2 * inner, scale=30)
    gate, up = both.double().chunk(2, -1)
    torch.testing.assert_close(between(4, 1, 1).gated(layer(), both).double(), F.silu(gate) * up, **NEAR)


def test_a_gate_may_be_any_number() -> None:
    gates = torch.tensor([-1e4, -200.0, -88.5, -87.0, 0.0, 87.0, 88.5, 200.0, 1e30, math.inf, math.nan])
    found = CompiledBetween(Places(random(1, 4), random(1, 4), 1, 1)).gated(
        layer(), torch.cat([gates, torch.ones_like(gates)])[None]
    )
    torch.testing.assert_close(found[0], F.silu(gates), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dim", [2, 20, 64])
def test_attention_is_pytorchs_in_float64(together: int, dim: int) -> None:
    rows, start, heads, places = 5, 2, 2, 70
    positions = torch.tensor([0, 1, 33, 69, 2])
    keys, values = random(rows + start, heads, places, dim), random(rows + start, heads, places, dim) + 1
    made = random(8, heads * (together + 2), dim, scale=2)
    query, key, value = (part[:rows] for part in made.split((heads * together, heads, heads), 1))
    before = keys.clone(), values.clone()
    attention = Attention(start, positions, heads * together, 8)
    found = attention(made, keys, values, 0.3)
    for arena, was, new in zip((keys, values), before, (key, value), strict=True):
        was[torch.arange(start, start + rows), :, positions] = new
        assert torch.equal(arena, was)  # the new ones are kept, and nothing else is touched
    for row, position in enumerate(positions.tolist()):
        seen = [arena[start + row, :, : position + 1].double()[None] for arena in (keys, values)]
        q = query[row].double()[None, :, None]
        expected = F.scaled_dot_product_attention(q, *seen, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(found[row].double(), expected.flatten(), **NEAR)
    assert not found[rows:].any()


@pytest.mark.parametrize("where", ["queries", "keys", "values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(where: str, bad: float) -> None:
    positions = torch.tensor([40, 40, 40])
    keys, values, made = random(3, 2, 64, 16), random(3, 2, 64, 16), random(3, 8, 16)
    clean = Attention(0, positions, 4, 3)(made.clone(), keys.clone(), values.clone(), 0.25)
    {"queries": made[1], "keys": keys[1, :, 7], "values": values[1, :, 7]}[where].fill_(bad)
    found = Attention(0, positions, 4, 3)(made, keys, values, 0.25)
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_a_row_does_not_depend_on_the_others() -> None:
    positions = torch.tensor([3, 60, 17])
    keys, values, made = random(3, 2, 64, 16), random(3, 2, 64, 16), random(3, 8, 16)
    together = Attention(0, positions, 4, 3)(made, keys.clone(), values.clone(), 0.25)
    for row in range(3):
        alone = Attention(row, positions[row : row + 1], 4, 4)(made[row : row + 1], keys, values, 0.25)
        assert torch.equal(alone[0], together[row])


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary positions of 8"):
        CompiledBetween(Places(random(3, 8), random(3, 8), 1, 1)).turned(layer(), random(3, 3, 16))
    arenas = random(3, 2, 64, 16), random(3, 2, 64, 16)
    with pytest.raises(ValueError, match="10 heads are not 4"):
        Attention(0, torch.tensor([1, 2, 3]), 4, 3)(random(3, 10, 16), *arenas, 0.25)
