"""Rows of single tokens on layouts: as PEFT has them in one process, however the table of tokens is cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model

from luthier.adapters.init import first_down
from luthier.adapters.rows import NewTokens
from luthier.batch import Sample
from luthier.config import LoraConfig
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import measure

pytestmark = [*PEFT_WARNINGS]

LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}, {"cp": 2}, {"tp": 2, "dp_shard": 2}]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose head is its embedding, and one that has its own."""
    config = debug_config("llama", layers=2, tie_word_embeddings=request.param)
    return save_strong(config, tmp_path_factory.mktemp("models") / "model")


def rows_with(tokens: tuple[int, ...]) -> list[Sample]:
    """The usual rows, in which some tokens are these: read, predicted, or both."""
    found = []
    for number, row in enumerate(documents()):
        ids = np.append(row.tokens, row.targets[-1])
        ids[number % 3 :: 5] = tokens[number % len(tokens)]
        found.append(Sample.from_ids(ids, np.append(np.float32(0), row.weights)))
    return found


def reference(path: Path, tokens: NewTokens) -> Reference:
    """What PEFT makes of these rows, with the adapters of `parallel.cases`."""
    base = plain_model(path, torch.float64)
    size = len(base.get_input_embeddings().weight)
    means = [end.weight.detach().mean(0) for end in (base.get_input_embeddings(), base.get_output_embeddings())]
    if max(tokens.ids) >= size:
        base.resize_token_embeddings(max(tokens.ids) + 1, mean_resizing=False)
    with torch.no_grad():
        for end, mean in zip((base.get_input_embeddings(), base.get_output_embeddings()), means, strict=True):
            end.weight[list(tokens.fresh)] = mean
    ids = list(tokens.ids)
    tied = base.config.tie_word_embeddings
    config = PeftLora(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        trainable_token_indices=ids if tied else {"embed_tokens": ids, "lm_head": ids},
    )
    peft = get_peft_model(base, config, autocast_adapter_dtype=False)
    prefix = "base_model.model."
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            layer, _, end = name.removeprefix(prefix).partition(".lora_")
            if end.startswith("A"):
                parameter.copy_(first_down(4, parameter.shape[1], layer, 0))
            elif end.startswith("B"):
                generator = torch.Generator().manual_seed(sum(layer.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    samples = rows_with(tokens.ids)
    expected = weighted_sum(peft, samples, 1 / sum(float(sample.weights.sum()) for sample in samples))
    expected.gradients = {
        name.removeprefix(prefix).replace(".default", ""): gradient for name, gradient in expected.gradients.items()
    }
    return expected


def tokens_of(path: Path, which: str) -> NewTokens:
    size = plain_model(path, torch.float64).config.vocab_size
    return NewTokens((5, size - 3)) if which == "old" else NewTokens((6, size - 1, size, size + 1), (size, size + 1))


@pytest.mark.parametrize("which", ["old", "new"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_that_of_peft(world: Any, path: Path, layout: dict[str, int], which: str) -> None:
    tokens = tokens_of(path, which)
    expected = reference(path, tokens)
    lora = LoraConfig(rank=4, target=["attn"])
    how: dict[str, Any] = {"lora": lora, "tokens": tokens}
    results = world(math.prod(layout.values())).run(measure, path, layout, rows_with(tokens.ids), **how)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    for result in results:
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=1e-10)
        assert result["gradients"].keys() == expected.gradients.keys()
        assert gradient_error(result["gradients"], expected.gradients) < 1e-10


def refused(path: Path, layout: dict[str, int], tokens: NewTokens) -> str:
    try:
        measure(path, layout, [], lora=LoraConfig(rank=4, target=["attn"]), tokens=tokens)
    except ConfigError as error:
        return str(error)
    return ""


def test_stages_are_refused(world: Any, path: Path) -> None:
    for said in world(2).run(refused, path, {"pp": 2}, NewTokens((5,))):
        assert "cannot run on pp 2: rows of single tokens are not dealt to stages" in said
        assert "dp_shard 2 would work" in said
