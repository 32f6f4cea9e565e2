"""`luthier evaluate`: the loss of a model on the validation rows of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luthier.config import RunConfig
from luthier.data.loader import Rows, build_rows
from luthier.engine.evaluate import evaluate as measure
from luthier.errors import DataError
from luthier.launch import join
from luthier.recipes.setup import held_out_batches, inference_network, meshed, prepare_process, tokenizer_of
from luthier.report.progress import stage


def evaluate(config: RunConfig, *, adapter: Path | None = None) -> dict[str, Any]:
    """Measure a model on every validation row once.

    Args:
        config: names the model, the data and the precision; how it trains is not looked at.
        adapter: a directory of PEFT files to put on the model.

    Returns:
        loss (nats a token), perplexity, rows, tokens, trained_tokens, and `data`: what became of the rows.
    """
    with join(prepare_process(config)) as device, meshed(config, device, any_number=True) as mesh:
        tokenizer = tokenizer_of(config, adapter)
        with stage("tokenising") as told:
            rows = build_rows(config.data, "validation", tokenizer, seed=config.seed, progress=told)
        assert isinstance(rows, Rows)
        if config.evaluation.rows is not None:
            rows = rows.first(config.evaluation.rows)
        network = inference_network(config, device, adapter, mesh)
        batches = held_out_batches(network, rows, config)
        with stage("evaluating") as told:
            result = measure(network, batches, progress=lambda done: told(done, len(rows)))
    if not result.trained_tokens:
        raise DataError("no row has a token that counts", where="data.validation", remedy="look with luthier data show")
    return {
        "model": config.model,
        "adapter": str(adapter) if adapter else None,
        **result.to_dict(),
        "data": rows.report.to_dict(),
    }
