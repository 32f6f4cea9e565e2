"""What the proofs of named models share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.verify.proof import Proofs
from tests.world import World


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory, world: Callable[[int], World]) -> Proofs:
    """Cells of models, each of which is made once in a module."""
    return Proofs(tmp_path_factory.mktemp("proofs"), world)
