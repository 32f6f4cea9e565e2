"""Frequencies that depend on length are each document's own. Oracle: plain Transformers, each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.batch import Batch, Sample
from luthier.hf.debug.tiny import debug_config
from luthier.hf.forward import hidden_states
from luthier.hf.head import head_logits
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from tests.oracles.plain import plain_model, save_strong
from tests.oracles.rope import DYNAMIC, LONGROPE


@pytest.mark.parametrize(("kind", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_packed_documents_have_the_frequencies_of_their_own_length(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    path = save_strong(debug_config(kind, **changes), tmp_path)
    random = np.random.default_rng(0)
    samples = [Sample.from_ids(random.integers(4, 260, n + 1), np.ones(n + 1)) for n in (13, 22, 1, 30, 7)]
    plain, ours = plain_model(path, torch.float64), load_model(resolve(str(path)), dtype="fp64")
    with torch.no_grad():
        alone = [plain(torch.from_numpy(s.tokens)[None], use_cache=False).logits[0] for s in samples]
        packed = head_logits(ours, hidden_states(ours, Batch.pack(samples)))
    assert (packed - torch.cat(alone)).abs().max() < 1e-10
