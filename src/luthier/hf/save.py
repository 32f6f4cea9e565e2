"""Writes a directory that plain `from_pretrained` opens: weights, config, generation config, tokenizer, template.

Weights go out layer by layer, from each rank what it holds (`save_weights`). Everything is written aside, synced, and
renamed into place at the end.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

import luthier
from luthier.errors import ModelError
from luthier.hf.gather import plain_class
from luthier.hf.quiet import quiet
from luthier.hf.save_weights import Transform, write_weights
from luthier.hf.source import EXPORT_MARK, ModelSource, fetch
from luthier.hf.together import Group, rank_in, tell, together
from luthier.hf.tokenizer import fingerprint
from luthier.hf.vision.processor import save_reader
from luthier.hf.weights import checkpoint_dtype

_log = logging.getLogger(__name__)


def save_model(
    model: PreTrainedModel,
    directory: Path | str,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_tokens: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    shard_bytes: int = 4 * 1024**3,
    card: str | None = None,
    transform: Transform | None = None,
    group: Group | None = None,
) -> Path:
    """Export a model.

    Args:
        model: whole or what this rank holds of it, on any device; without adapters unless `transform` deals with them.
        directory: where to; replaced if it is an earlier export.
        tokenizer: written beside the weights with its chat template.
        stop_tokens: the generation config's `eos_token_id` list; its own is kept when empty.
        dtype: of the floating weights; the model's own when left out. See `base_dtype`.
        shard_bytes: a file ends before it would grow beyond this.
        card: text of README.md.
        transform: changes weights on their way out; merges adapters without touching the model in memory.
        group: all ranks that hold parts of the model, all of which call this and see the directory; None where this
            process holds it whole.

    Returns:
        the directory.

    Raises:
        ModelError: the directory holds something else, or adapters are still in the model.
    """
    target = Path(directory)
    # That of its first weight, which on a later stage may be one that is kept in fp32: the first rank knows.
    wanted = dtype if dtype is not None else tell(model.dtype, group)
    facts = {"dtype": str(wanted).removeprefix("torch.")}
    facts |= {"tokenizer": fingerprint(tokenizer)} if tokenizer is not None else {}
    with replacing(target, facts, group) as aside, quiet():
        tied = write_weights(model, aside, wanted, shard_bytes, transform, group)
        with together(group):
            if rank_in(group) == 0:
                _write_configs(model, aside, wanted, tied, stop_tokens)
                if tokenizer is not None:
                    _write_tokenizer(tokenizer, aside)
                if card is not None:
                    (aside / "README.md").write_text(card, encoding="utf-8")
    return target


@contextmanager
def replacing(target: Path, facts: Mapping[str, str], group: Group | None = None) -> Iterator[Path]:
    """A directory to write an export into, which takes the target's name when all has gone well.

    Args:
        target: replaced if it is an earlier export, of whatever form: no file of another form stays beside the new.
        facts: what the mark of the export says besides the version.
        group: ranks that write into it, all of which enter and leave; rank 0 makes, renames and removes it.

    Raises:
        ModelError: the target holds something that is no export, or is not the same directory on all ranks.
    """
    leads = rank_in(group) == 0
    aside = target.parent / tell(f".{target.name}.{uuid.uuid4().hex[:8]}.partial", group)
    try:
        with together(group):
            if leads:
                _require_replaceable(target)
                target.parent.mkdir(parents=True, exist_ok=True)
                aside.mkdir()
        with together(group):
            if not aside.is_dir():
                remedy = "name one on a file system that they share"
                raise ModelError("it is not the same directory on all ranks", where=str(target), remedy=remedy)
        with together(group):
            yield aside
        with together(group):
            if leads:
                mark = {"luthier": luthier.__version__, **facts}
                (aside / EXPORT_MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
                _commit(aside, target)
    finally:
        if leads:
            shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed exports to a directory left beside it; only while nobody else is writing there."""
    for path in directory.parent.glob(f".{directory.name}.*"):
        if path.suffix in (".partial", ".old"):
            shutil.rmtree(path)


def base_dtype(source: ModelSource) -> torch.dtype | None:
    """The dtype in which a base model's own weights lie; None where they lie in none (GGUF blocks, random weights)."""
    if source.kind not in ("directory", "hub"):
        return None
    return checkpoint_dtype(fetch(source, weights=True))


def _require_replaceable(target: Path) -> None:
    if not target.exists() or (target.is_dir() and (not any(target.iterdir()) or (target / EXPORT_MARK).is_file())):
        return
    what = "the directory holds something that is no export" if target.is_dir() else "it is a file"
    raise ModelError(what, where=str(target), remedy="name a new directory, or empty this one yourself")


def _write_configs(
    model: PreTrainedModel, aside: Path, dtype: torch.dtype, tied: bool, stop_tokens: Sequence[int]
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [plain_class(model).__name__]
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in (part for part in parts if part is not None):
        part.dtype = dtype
        if not tied and getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    config._name_or_path = ""
    if model.is_remote_code():
        custom_object_save(model, str(aside), config=cast(Any, config))  # the code that builds it goes along
    config.save_pretrained(str(aside))
    if not model.can_generate() or model.generation_config is None:
        return
    generation = copy.deepcopy(model.generation_config)
    if stop_tokens:
        generation.eos_token_id = list(stop_tokens) if len(stop_tokens) > 1 else stop_tokens[0]
    # not by its own save_pretrained, which refuses settings that many published models have
    generation.to_json_file(
        str(aside / "generation_config.json"), use_diff=True, keys_to_pop=["compile_config", "_from_model_config"]
    )


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, aside: Path) -> None:
    save_reader(tokenizer, aside)
    file = aside / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("name_or_path", "gguf_file", "vocab_file", "tokenizer_file", "is_local", "local_files_only"):
        content.pop(name, None)  # where it was loaded from, on this machine
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    plain = AutoTokenizer.from_pretrained(str(aside))
    if fingerprint(plain) != fingerprint(tokenizer):
        _log.warning(
            "AutoTokenizer opens this export's tokenizer as %s, which cuts text otherwise than it was trained on; "
            "open it with PreTrainedTokenizerFast.from_pretrained",
            type(plain).__name__,
        )


def _commit(aside: Path, target: Path) -> None:
    """Let the finished directory take the name: a reader finds the old export or the new, or for a moment none."""
    for file in aside.iterdir():
        _sync(file)
    _sync(aside)
    if target.exists():
        old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
