"""Products from panels, against float64, with the tiles of processors of either kind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from luthier.hf.decoding.panels import Panels, suits

SIZES = [(32, 960, 576), (8, 48, 192), (1, 49, 200), (13, 500, 1000), (7, 3, 5), (100, 96, 193)]
"""Rows, outputs, inputs: whole tiles, and rests of rows, columns and inputs."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_products_are_as_exact_as_pytorchs(rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    expected = x.double() @ weight.double().T + bias
    cut = outputs // 3
    found = Panels(weight[:cut], weight[cut:]).product(x, bias)

    def error(given: Tensor) -> float:
        return float((given.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    assert error(found) <= max(2 * error(torch.nn.functional.linear(x, weight, bias)), 4e-7)
    assert torch.equal(Panels(weight).product(x[None].expand(2, -1, -1))[1], Panels(weight).product(x))


def test_a_row_is_the_same_in_any_company() -> None:
    x, panels = random(37, 300), Panels(random(130, 300))
    whole = panels.product(x)
    for count in (1, 8, 9, 36):
        assert torch.equal(panels.product(x[-count:]), whole[-count:])


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, panels = random(9, 40), Panels(random(50, 40))
    clean = panels.product(x)
    x[3, 7], x[8, 0] = float("nan"), float("inf")
    found = panels.product(x)
    assert not found[[3, 8]].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], clean[others])


def test_other_dtypes_are_left_to_others() -> None:
    assert suits(random(4, 4))
    assert not suits(random(4, 4).bfloat16())
    assert not suits(random(4, 4).double())


AVX2 = """
import torch
from luthier.hf.decoding import panels
assert panels._COLUMNS == 24, panels._COLUMNS
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(*shape, generator=generator) for shape in ((13, 200), (50, 200)))
expected = x.double() @ weight.double().T
torch.testing.assert_close(panels.Panels(weight).product(x).double(), expected, rtol=1e-5, atol=1e-4)
"""


def test_processors_without_avx512_have_smaller_tiles() -> None:
    settings = {"ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    done = subprocess.run([sys.executable, "-c", AVX2], env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def wide_default() -> Iterator[None]:
    """As while Transformers builds a model of another precision, in another thread."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("wide_default")
def test_the_default_dtype_is_not_theirs() -> None:
    x, weight = random(5, 20).float(), random(30, 20).float()
    torch.testing.assert_close(Panels(weight).product(x), x @ weight.T)


def test_rows_of_another_kind_are_refused() -> None:
    panels = Panels(random(30, 20))
    for x in (random(5, 10), random(5, 20).double()):
        with pytest.raises(ValueError, match="panels of 20 fp32 inputs"):
            panels.product(x)


SWITCHED = """
import torch
from luthier.hf.decoding.panels import Panels
x, weight = torch.ones(13, 200), torch.ones(50, 200)
assert (Panels(weight).product(x) == 200).all()
"""


def test_code_that_was_kept_is_of_the_same_tiles(tmp_path: Path) -> None:
    """PyTorch can be told to use less of the processor, which Numba's cache does not know of."""
    for more in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **more}
        done = subprocess.run([sys.executable, "-c", SWITCHED], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
