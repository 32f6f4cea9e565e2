"""Weights of a model, whole or in parts on many ranks, written as files that the Hub's tools read.

What will be written is laid out on meta first: names, dtypes, shapes, and which rank writes which file. Then weights
are gathered a layer at a time, each on the rank that writes it, converted back to the Hub's names (Transformers'
conversions are reverted) and put in their places. So no rank holds more than a layer beside its own part, and files
hold the same on every layout.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from luthier.errors import ModelError
from luthier.hf.gather import gather, plain_class, reshard
from luthier.hf.load import build_on_meta
from luthier.hf.tensor_file import Entry, TensorFile
from luthier.hf.together import Group, exchange, global_rank, rank_in, together, told_once

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_GROUP = re.compile(r"^(.*?\.\d+)\.")


class Transform(Protocol):
    """Changes weights on their way out, and leaves the model as it is."""

    def sources(self, name: str) -> Sequence[str] | None:
        """What the weight of a name is made of: names of the model's weights, its own first, None to leave it out.

        A weight that is made of itself alone is written as it is.
        """

    def __call__(self, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a weight of its sources' whole values, in the dtype of the first."""

    def shape(self, name: str, own: torch.Size) -> torch.Size:
        """The shape that a weight will have, whose own in the model is given."""

    def keeps_tie(self, twin: str, owner: str) -> bool:
        """Whether two names of one weight will still stand for one."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Weights that are converted together: those of a layer, or one that is in no layer.

    Attributes:
        names: of the model.
        entries: what is written for them.
    """

    names: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts that one rank writes, mostly into one file, a part that is larger than a file may be into several.

    Attributes:
        writer: rank in the group.
        ranks: of the stage that holds the parts, the writer among them.
        parts: in the model's order.
        files: what each holds.
    """

    writer: int
    ranks: tuple[int, ...]
    parts: tuple[_Part, ...]
    files: tuple[tuple[Entry, ...], ...]


def write_weights(
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    transform: Transform | None,
    group: Group | None,
) -> bool:
    """Write every weight into a directory, `model.safetensors` or an index and files.

    Args:
        model: whole, or what this rank holds of it.
        directory: seen by all ranks.
        dtype: of the floating weights.
        shard_bytes: a file ends before it would grow beyond this.
        transform: makes some of the weights.
        group: all ranks that hold parts of the model, all of which call this; None where this one holds it whole.

    Returns:
        whether the head stays tied to the embedding.

    Raises:
        ModelError: a weight is none of a plain model's.
    """
    reshard(model)
    outline = _Outline(model, dtype, transform)
    tied = all(exchange(outline.tied, group))
    batches = _planned(outline, shard_bytes, group)
    files = [file for batch in batches for file in batch.files]
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    with together(group):
        _write(outline, batches, directory, names, group)
        if len(files) > 1 and rank_in(group) == 0:
            entries = [entry for file in files for entry in file]
            where = {entry.name: name for file, name in zip(files, names, strict=True) for entry in file}
            total = {"total_size": sum(e.nbytes for e in entries), "total_parameters": sum(e.numel for e in entries)}
            index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return tied


class _Outline:
    """What this rank holds of a model, and what is written for it."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, transform: Transform | None) -> None:
        self.model, self.transform = model, transform
        cls = cast(type[PreTrainedModel], plain_class(model))
        plain = build_on_meta(cls, model.config)
        known = list(plain.state_dict())
        self.held = _weights(model)
        for name in self.held.keys() - set(known):
            if transform is None or transform.sources(name) is not None:
                remedy = "merge the adapters, or detach them"
                raise ModelError(f"{name} is no weight of a plain {cls.__name__}", where="export", remedy=remedy)
        names = [name for name in known if name in self.held]
        self.tied = True
        for twin, owner in plain.all_tied_weights_keys.items():
            if twin not in self.held or owner not in self.held:
                continue
            kept = self.transform is None or self.transform.keeps_tie(twin, owner)
            if self.held[twin] is self.held[owner] and kept:
                names.remove(twin)
            else:
                self.tied = False
        ignored = set(model._keys_to_ignore_on_save or ())
        self._place = {name: place for place, name in enumerate(known)}
        self._dtype = dtype
        narrow = dtype in (torch.float16, torch.bfloat16)
        self._wide = tuple(model._keep_in_fp32_modules_strict or ()) if narrow else ()
        self.parts = [self._part(group) for group in _groups(name for name in names if name not in ignored)]

    def sources(self, name: str) -> Sequence[str]:
        found = (name,) if self.transform is None else self.transform.sources(name)
        assert found is not None, f"{name} was left out of the export"
        return found

    def place(self, part: _Part) -> int:
        """Where a part stands in the order of the whole model."""
        return self._place[part.names[0]]

    def dtype(self, name: str) -> torch.dtype:
        own = self.held[name].dtype
        if not own.is_floating_point:
            return own
        keep = any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in self._wide)
        return torch.float32 if keep else self._dtype

    def values(self, names: Sequence[str], writer: int) -> dict[str, torch.Tensor]:
        """Weights as they go out, on the rank that writes them; nothing on the others, which give what they hold.

        What a transform raises is raised after the last weight, so that no rank waits for another in vain.
        """
        found: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        for name in names:
            gathered = [gather(self.held[source], writer) for source in self.sources(name)]
            sources = [source for source in gathered if source is not None]
            if not sources:
                continue
            value = sources[0]
            if len(sources) > 1 and failure is None:
                assert self.transform is not None
                try:
                    value = self.transform(name, sources)
                except Exception as error:
                    failure = error
            found[name] = value.to(self.dtype(name))
        if failure is not None:
            raise failure
        return found

    def _shape(self, name: str) -> torch.Size:
        own = self.held[name].shape
        return own if self.transform is None else self.transform.shape(name, own)

    def _part(self, names: tuple[str, ...]) -> _Part:
        empty = {name: torch.empty(self._shape(name), dtype=self.dtype(name), device="meta") for name in names}
        entries = [Entry.of(name, value) for name, value in revert_weight_conversion(self.model, empty).items()]
        return _Part(names, tuple(entries))


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name -> weight as the architecture names it, tied ones under each of their names; no copies."""
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        state[name] = value
    return state


def _groups(names: Iterator[str]) -> list[tuple[str, ...]]:
    """Names by layer: conversions join or split weights within one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _GROUP.match(name)
        groups.setdefault(match.group(1) if match else name, []).append(name)
    return [tuple(group) for group in groups.values()]


def _planned(outline: _Outline, shard_bytes: int, group: Group | None) -> list[_Batch]:
    """Who writes what, in the order of the whole model; the same on every rank.

    Ranks that hold the same names are a stage, and a stage writes what it holds; what several hold, the first does.
    """
    own = [(outline.place(part), part) for part in outline.parts]
    planned: dict[int, tuple[_Part, list[int]]] = {}
    for ranks, parts in told_once(own, group):
        for place, part in parts:
            planned.setdefault(place, (part, ranks))
    ordered = [planned[place] for place in sorted(planned)]
    batches: list[_Batch] = []
    for _, stage in itertools.groupby(ordered, key=lambda item: item[1][0]):
        found = list(stage)
        ranks = found[0][1]
        for number, batch in enumerate(_batched([part for part, _ in found], shard_bytes)):
            files = tuple(_files(batch, shard_bytes))
            batches.append(_Batch(ranks[number % len(ranks)], tuple(ranks), tuple(batch), files))
    return batches


def _batched(parts: Sequence[_Part], limit: int) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    for part in parts:
        if batch and sum(p.nbytes for p in batch) + part.nbytes > limit:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _files(parts: Sequence[_Part], limit: int) -> Iterator[tuple[Entry, ...]]:
    file: list[Entry] = []
    for entry in (entry for part in parts for entry in part.entries):
        if file and sum(e.nbytes for e in file) + entry.nbytes > limit:
            yield tuple(file)
            file = []
        file.append(entry)
    yield tuple(file)


def _write(
    outline: _Outline, batches: Sequence[_Batch], directory: Path, names: Sequence[str], group: Group | None
) -> None:
    """Gather part after part, each where it is written; all ranks of a stage take the same parts in the same order."""
    waiting = iter(names)
    pens = [_Pen(batch, [directory / next(waiting) for _ in batch.files]) for batch in batches]
    here = rank_in(group)
    own = [pen for pen in pens if here in pen.batch.ranks]
    failure: Exception | None = None
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1, "export") as disk, ExitStack() as ended:
        for pen in own:
            ended.callback(pen.end)
        for pen, part in _in_turn(own):
            mine = pen.batch.writer == here
            if mine and writing is not None:
                failure, writing = failure or cast(Exception | None, writing.exception()), None
            writer = global_rank(group, pen.batch.writer)
            try:
                values = outline.values(part.names, writer)
                if mine and failure is None:
                    converted = revert_weight_conversion(outline.model, values)
                    writing = disk.submit(pen.write, converted)  # while the next part is gathered
                    del converted
                del values
            except Exception as error:  # others wait for what this rank holds, so it goes on giving
                failure = failure or error
        if writing is not None:
            failure = failure or cast(Exception | None, writing.exception())
    if failure is not None:
        raise failure


class _Pen:
    """The files of a batch, on the rank that writes them."""

    def __init__(self, batch: _Batch, paths: Sequence[Path]) -> None:
        self.batch = batch
        self._paths = paths
        self._files: list[TensorFile] = []
        self._left = sum(len(file) for file in batch.files)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the tensors of a part; after the last one the files are closed."""
        if not self._files:
            self._files = [TensorFile(path, file) for path, file in zip(self._paths, self.batch.files, strict=True)]
        where = {entry.name: number for number, file in enumerate(self.batch.files) for entry in file}
        for name, value in tensors.items():
            self._files[where[name]].write(name, value)
        self._left -= len(tensors)
        if not self._left:
            for file in self._files:
                file.close()

    def end(self) -> None:
        """Let go of files that something has kept from being finished."""
        for file in self._files:
            file.drop()


def _in_turn(pens: Sequence[_Pen]) -> Iterator[tuple[_Pen, _Part]]:
    """The parts of a stage's files: a part of every writer in turn, so that all of them write at once."""
    for start in range(0, len(pens), len(pens[0].batch.ranks) if pens else 1):
        together_now = pens[start : start + len(pens[0].batch.ranks)]
        for row in itertools.zip_longest(*([(pen, part) for part in pen.batch.parts] for pen in together_now)):
            yield from (item for item in row if item is not None)
