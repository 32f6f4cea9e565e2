"""Writes a directory that plain `from_pretrained` opens: weights, config, generation config, tokenizer, template.

Weights go out group by group under the names that the Hub uses (Transformers' conversions are reverted), so never more
than one shard is held beside the model. Everything is written aside, synced, and renamed into place at the end.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

import luthier
from luthier.errors import ModelError
from luthier.hf.load import build_on_meta
from luthier.hf.quiet import quiet
from luthier.hf.source import EXPORT_MARK, ModelSource, fetch
from luthier.hf.tokenizer import fingerprint
from luthier.hf.weights import checkpoint_dtype

Transform = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Given a weight's name and value, what to write for it (itself to leave it as it is), or None to leave it out."""

_log = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_GROUP = re.compile(r"^(.*?\.\d+)\.")


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
) -> Path:
    """Export a model.

    Args:
        model: whole, on any device; without adapters unless `transform` deals with them.
        directory: where to; replaced if it is an earlier export.
        tokenizer: written beside the weights with its chat template.
        stop_tokens: the generation config's `eos_token_id` list; its own is kept when empty.
        dtype: of the floating weights; the model's own when left out. See `base_dtype`.
        shard_bytes: a file ends before it would grow beyond this.
        card: text of README.md.
        transform: changes weights on their way out; merges adapters without touching the model in memory.

    Returns:
        the directory.

    Raises:
        ModelError: the directory holds something else, or adapters are still in the model.
    """
    target = Path(directory)
    wanted = dtype if dtype is not None else model.dtype
    facts = {"dtype": str(wanted).removeprefix("torch.")}
    facts |= {"tokenizer": fingerprint(tokenizer)} if tokenizer is not None else {}
    with replacing(target, facts) as aside:
        with quiet():
            tied = _write_weights(model, aside, wanted, shard_bytes, transform)
            _write_configs(model, aside, wanted, tied, stop_tokens)
            if tokenizer is not None:
                _write_tokenizer(tokenizer, aside)
        if card is not None:
            (aside / "README.md").write_text(card, encoding="utf-8")
    return target


@contextmanager
def replacing(target: Path, facts: Mapping[str, str]) -> Iterator[Path]:
    """A directory to write an export into, which takes the target's name when all has gone well.

    Args:
        target: replaced if it is an earlier export, of whatever form: no file of another form stays beside the new.
        facts: what the mark of the export says besides the version.

    Raises:
        ModelError: the target holds something that is no export.
    """
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    aside.mkdir()
    try:
        yield aside
        mark = {"luthier": luthier.__version__, **facts}
        (aside / EXPORT_MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
        _commit(aside, target)
    finally:
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


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name -> weight as the architecture names it, tied ones under each of their names; no copies."""
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        state[name] = value
    return state


def _write_weights(
    model: PreTrainedModel, aside: Path, dtype: torch.dtype, shard_bytes: int, transform: Transform | None
) -> bool:
    """Write every weight; returns whether the head stays tied to the embedding."""
    plain = build_on_meta(type(model), model.config)
    known = set(plain.state_dict())
    weights = _weights(model)
    changed: dict[str, torch.Tensor] = {}
    for name in list(weights):
        if name in known:
            continue
        left = transform(name, weights[name].detach()) if transform is not None else weights[name]
        if left is not None:
            remedy = "merge the adapters, or detach them"
            raise ModelError(f"{name} is no weight of a plain {type(model).__name__}", where="export", remedy=remedy)
        del weights[name]
    tied = True
    for twin, owner in plain.all_tied_weights_keys.items():
        if twin not in weights or owner not in weights:
            continue
        if weights[twin] is weights[owner] and not _differs(twin, owner, weights, transform, changed):
            del weights[twin]
        else:
            tied = False
    for pattern in model._keys_to_ignore_on_save or []:
        weights.pop(pattern, None)
    strict = tuple(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else ()

    def outgoing(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        group = {}
        for name in names:
            value = changed.pop(name, None)
            if value is None:
                value = weights[name].detach()
                value = transform(name, value) if transform is not None else value
            assert value is not None, f"{name} was left out of the export"
            keep = any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in strict)
            group[name] = value.to(torch.float32 if keep else dtype) if value.is_floating_point() else value
        yield from revert_weight_conversion(model, group).items()

    _write_shards(aside, (pair for names in _groups(weights) for pair in outgoing(names)), shard_bytes)
    return tied


def _differs(
    twin: str,
    owner: str,
    weights: dict[str, torch.Tensor],
    transform: Transform | None,
    changed: dict[str, torch.Tensor],
) -> bool:
    """Whether a transform makes two different weights of a tied one (an adapter merged into the head alone)."""
    if transform is None:
        return False
    value = weights[twin].detach()
    new = transform(twin, value)
    if new is value or new is None:
        return False
    changed[twin] = new
    return True


def _groups(weights: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names by layer: conversions join or split weights within one."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        match = _GROUP.match(name)
        groups.setdefault(match.group(1) if match else name, []).append(name)
    return list(groups.values())


def _write_shards(aside: Path, weights: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = parameters = 0

    def flush() -> None:
        shards.append(list(held))
        save_file(held, aside / f"shard-{len(shards)}", metadata={"format": "pt"})
        held.clear()

    for name, value in weights:
        value = value.detach().to("cpu").contiguous()
        if held and size + value.nbytes > shard_bytes:
            flush()
            size = 0
        if any(value.data_ptr() == other.data_ptr() and value.nbytes for other in held.values()):
            value = value.clone()  # views of one tensor, and safetensors wants each weight to have its own memory
        held[name] = value
        size += value.nbytes
        total += value.nbytes
        parameters += value.numel()
    flush()
    if len(shards) == 1:
        (aside / "shard-1").rename(aside / "model.safetensors")
        return
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (aside / f"shard-{number}").rename(aside / file)
        where.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(where.items())),
    }
    (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(
    model: PreTrainedModel, aside: Path, dtype: torch.dtype, tied: bool, stop_tokens: Sequence[int]
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
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
    tokenizer.save_pretrained(str(aside))
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
