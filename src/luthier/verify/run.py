"""`luthier verify CONFIG`: the model of a config on its layout, beside plain Transformers in one process."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from luthier.config import ParallelConfig, RunConfig
from luthier.errors import ConfigError, UserError
from luthier.hf.debug.shrink import VOCABULARY, shrink
from luthier.hf.load import trainable_class
from luthier.hf.source import ModelSource, fetch, load_config, resolve
from luthier.parallel.layout import Layout
from luthier.verify import group
from luthier.verify.table import lines
from luthier.verify.trial import Cell, Trial, documents

STEPS = 3
LENGTHS = {True: (23, 7, 12, 18), False: (47, 13, 29, 38)}
"""Tiny or not -> lengths of the documents of a step, for each rank that reads its own."""
TIMEOUT, PATIENCE = 3600.0, 1800.0
"""Real models take their time in float64."""


def verify(config: RunConfig, *, tiny: bool, nproc: int | None = None) -> tuple[list[Cell], list[str]]:
    """Train a few steps on both sides and compare.

    Args:
        config: its model, adapter, layout and ways of computing count; its data and precision do not: documents are
            random, the proof is in float64.
        tiny: the same architecture and options made small, with large random weights, instead of the model itself.
        nproc: processes to start; as many as the layout takes when left out.

    Returns:
        what was found, and the lines that say so.

    Raises:
        ConfigError: the layout does not admit the model, or is not for so many processes.
        ModelError: the model cannot be found, or is none that a run can train.
        UserError: there is an adapter, and PEFT, which it is compared with, is not installed.
    """
    if config.adapter is not None and config.adapter.kind != "lora":
        what = f"adapters of kind {config.adapter.kind} have no reference here"
        raise ConfigError(what, where="adapter.kind", remedy="verify the layout with kind: lora")
    if config.adapter is not None and config.adapter.new_tokens:
        what = "rows of single tokens have no reference here"
        raise ConfigError(what, where="adapter.new_tokens", remedy="leave it out")
    if config.adapter is not None and config.adapter.dropout:
        raise ConfigError("dropout cannot be compared", where="adapter.dropout", remedy="set it to 0")
    if config.adapter is not None:
        require_peft()
    layout = _layout(config.parallel, nproc)
    source = resolve(config.model, revision=config.revision)
    own = load_config(source, trust_remote_code=config.trust_remote_code)
    trainable_class(source, own, trust_remote_code=config.trust_remote_code)  # before any process is started for it
    small = tiny or source.kind == "debug"
    device = config.train.device or "cpu"
    with tempfile.TemporaryDirectory(prefix="luthier-verify-") as name:
        scratch = Path(name)
        with (
            group.reference(scratch / "reference.log", TIMEOUT) as reference,
            group.ranks(layout.ranks, scratch / "ranks.log", TIMEOUT, device=device, patience=PATIENCE) as ranks,
        ):
            vocabulary = VOCABULARY
            if small:
                model = _make_small(config, source, own, layout, scratch / "model")
                reference.call("make", directory=model["path"])
            else:
                model = _real(source)
                vocabulary = own.get_text_config(decoder=True).vocab_size
            lengths = LENGTHS[small] * layout.data_ranks
            trial = Trial(
                model,
                documents(vocabulary, lengths, STEPS, seed=config.seed),
                scratch / "files",
                reference,
                adapter=config.adapter,
                options={
                    "attention": config.train.attention,
                    "activation_checkpointing": config.train.activation_checkpointing,
                    "compile_layers": config.train.compile,
                },
                device=device,
                large=not small,
            )
            lora = config.adapter is not None
            parallel = config.parallel.model_dump(mode="json", exclude_unset=True)
            cell = trial.cell(ranks, parallel, lora=lora, name=str(layout) + (" with LoRA" if lora else ""))
            if cell.status == "refused":
                raise ConfigError(cell.reason, where="parallel", remedy="choose another layout")
            expected = trial.expected(lora)
    about: dict[str, Any] = {
        "model": config.model + (" made tiny" if tiny else ""),
        "class": expected["class"],
        "parameters": expected["total"],
        "steps": STEPS,
        "tokens": sum(lengths),
        "precision": expected["precision"],
    }
    return [cell], lines([cell], about)


def require_peft() -> None:
    """Refuse to compare adapters where there is nothing to compare them with.

    Raises:
        UserError: PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "adapters are compared with PEFT's, and peft is not installed",
            where="adapter",
            remedy="install it with: pip install 'luthier[verify]'",
        )


def _layout(parallel: ParallelConfig, nproc: int | None) -> Layout:
    if nproc is None:
        degrees = (parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp, parallel.pp)
        nproc = 1
        for degree in degrees:
            nproc *= max(1, degree)
    return Layout.resolve(parallel, nproc)


def _make_small(config: RunConfig, source: ModelSource, whole: Any, layout: Layout, directory: Path) -> dict[str, Any]:
    if source.kind != "debug":
        stages = layout.pp * (config.parallel.stages_per_rank or 1)
        whole = shrink(whole, layers=max(2, stages))
    directory.mkdir()
    whole.save_pretrained(directory)
    return {"path": str(directory)}


def _real(source: ModelSource) -> dict[str, Any]:
    if source.gguf_file:
        return {"path": str(source.path), "gguf_file": source.gguf_file}
    return {"path": str(fetch(source, weights=True))}
