"""How many threads PyTorch has in a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, which of them works on a row of fp32 attention may change its last bit."""
    with _threads(1):
        yield


@pytest.fixture
def three_threads() -> Iterator[None]:
    """With so many, PyTorch's operations do what compiled loops do otherwise."""
    with _threads(3):
        yield
