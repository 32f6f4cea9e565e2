"""`luthier combine`: several adapters made one, or added to their base at once."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from luthier.adapters import Merging
from luthier.adapters.combine import Method, Part, Sign, combine
from luthier.config import LoraConfig
from luthier.engine.build import Precision, build_network, choose_device
from luthier.engine.network import Network
from luthier.errors import ConfigError, ModelError
from luthier.hf.load import DTYPES
from luthier.hf.save import base_dtype, replacing, save_model
from luthier.hf.source import ModelSource, named_in, resolve
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
        precision: in which the base is read; that of its files when left out (fp32 where they have none that is one),
            so that what no adapter touches is written as it was.
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
    dtype = base_dtype(source)
    if precision is None:
        precision = cast(Precision, next((name for name, known in DTYPES.items() if known == dtype), "fp32"))
    with tempfile.TemporaryDirectory(prefix="luthier-combine-") as scratch:
        made = combine(parts, Path(scratch), **how)
        network = _beside_its_base(
            scratch,
            source,
            precision=precision,
            device=choose_device(None),
            trust_remote_code=trust_remote_code,
        )
        merging = Merging(network.model)
        save_model(
            network.model,
            output,
            tokenizer=load_tokenizer(source, trust_remote_code=trust_remote_code),
            dtype=dtype,
            transform=merging,
        )
    report = str(merging.report())
    logger.info("%s", report)
    return {**told, "form": "merge", "method": method, "layers": made.layers, "rank": made.rank, "merged": report}


def _beside_its_base(made: str, source: ModelSource, **how: Any) -> Network:
    """The base with the adapter that was made beside it, in the float32 that it was made in: it is rounded once, with
    what it is added to.

    Raises:
        ModelError: the base cannot be read, or is not the adapters'; what was made is gone by then, and is not named.
    """
    with named_in("--model"):
        try:
            return build_network(source, adapter=LoraConfig(start_from=made, dtype="fp32"), **how)
        except ModelError as error:
            if not str(error.where).startswith(made):
                raise
            raise ModelError(error.what, where="--model", remedy=error.remedy) from error
