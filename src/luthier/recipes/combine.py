"""`luthier combine`: several adapters made one, or added to their base at once."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luthier.adapters import Merging
from luthier.adapters.combine import Method, Part, Sign, combine
from luthier.config import LoraConfig
from luthier.engine.build import Precision, build_network, choose_device
from luthier.errors import ConfigError
from luthier.hf.save import base_dtype, replacing, save_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def combine_adapters(
    parts: Sequence[Part],
    *,
    output: Path,
    method: Method = "cat",
    density: float | None = None,
    sign: Sign = "total",
    rank: int | None = None,
    seed: int = 0,
    model: str | None = None,
    precision: Precision | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write one adapter made of several, or their base with all of them added to it.

    Args:
        parts: directories of PEFT files, weighted.
        output: where to; replaced if it is an earlier export.
        method, density, sign, rank, seed: as of `adapters.combine`.
        model: the base, as a model is named; a whole model is then written.
        precision: in which the base is read; what the device is fast at when left out.
        trust_remote_code: run code that the model's repository brings.

    Raises:
        ConfigError: they cannot be combined so.
        ModelError: files cannot be read, or do not fit the base.
    """
    how: dict[str, Any] = {"method": method, "density": density, "sign": sign, "rank": rank, "seed": seed}
    told = {"parts": [{"adapter": str(part.directory), "weight": part.weight} for part in parts], "export": str(output)}
    if any(part.directory.resolve() == output.resolve() for part in parts):
        raise ConfigError("it is one of the adapters", where="--output", remedy="name another directory")
    if model is None:
        with replacing(output, {}) as aside:
            made = combine(parts, aside, **how)
        logger.info("%s of %d adapters: %d layers, rank %d", method, len(parts), made.layers, made.rank)
        return {**told, "form": "adapter", "method": method, "layers": made.layers, "rank": made.rank}
    source = resolve(model)
    with tempfile.TemporaryDirectory(prefix="luthier-combine-") as scratch:
        made = combine(parts, Path(scratch), **how)
        network = build_network(
            source,
            adapter=LoraConfig(start_from=scratch),
            precision=precision,
            device=choose_device(None),
            trust_remote_code=trust_remote_code,
        )
        merging = Merging(network.model)
        save_model(
            network.model,
            output,
            tokenizer=load_tokenizer(source, trust_remote_code=trust_remote_code),
            dtype=base_dtype(source),
            transform=merging,
        )
    report = str(merging.report())
    logger.info("%s", report)
    return {**told, "form": "merge", "method": method, "layers": made.layers, "rank": made.rank, "merged": report}
