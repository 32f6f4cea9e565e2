"""Log-probabilities of whole answers: of rows that are measured, and of rows under a reference model.

An answer's log-probability is the sum over its tokens, in float64, by the row's number and the answer's place in it,
whatever packing, microbatches and ranks are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from luthier.adapters.disabled import without_adapters
from luthier.batch import Batch, Sample
from luthier.config import AdapterConfig
from luthier.data.cache import cache_directory
from luthier.data.loader import Rows, iterate_once
from luthier.engine import randomness
from luthier.engine.evaluate import logprobs_of
from luthier.engine.identity import config_digest, model_digest
from luthier.engine.network import Network
from luthier.errors import NonFiniteError
from luthier.hf.source import named_in
from luthier.hf.together import tell
from luthier.losses.preference import document_sums
from luthier.recipes.each_alone import WIDTH, apart
from luthier.recipes.run import Run
from luthier.recipes.setup import inference_network, model_source, require_same_tokens
from luthier.report.progress import stage

logger = logging.getLogger(__name__)

_VERSION = 3


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Some rows of many, under the numbers that they have among all."""

    rows: Rows
    numbers: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths[self.numbers]

    @property
    def sight(self) -> Any:
        return self.rows.sight

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[int(self.numbers[index])]


@torch.no_grad()
def sums_of(
    network: Network,
    rows: Rows,
    numbers: np.ndarray,
    *,
    sequence_length: int,
    packing: bool,
    share_prefixes: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the answers of rows, and how many tokens each has; on a layout all ranks call it.

    Args:
        network: its model is put into evaluation mode meanwhile (no dropout), and back.
        rows: all rows.
        numbers: which of them.
        sequence_length: as of the data section.
        packing: whether several rows may share a batch.
        share_prefixes: whether a row's prompt is run once for its answers.
        progress: told how many rows are done.

    Returns:
        float64 [len(numbers), WIDTH] twice, the same on every rank; NaN where a row has no such answer.
    """
    model, mesh = network.model, network.mesh
    was_training = model.training
    model.eval()
    places = {int(number): place for place, number in enumerate(numbers)}
    found = np.zeros((3, len(numbers), WIDTH))  # sums, tokens, whether there is one
    chosen = _Chosen(rows, numbers)
    capacity = max(sequence_length, int(chosen.lengths.max(initial=0)))
    rank, ranks = (mesh.data_rank, mesh.data_ranks) if mesh is not None else (0, 1)
    remaining = iterate_once(cast(Rows, chosen), capacity, rank=rank, world_size=ranks, packing=packing)
    together = 1 if network.pipeline is None else 4 * network.pipeline.ranks
    done = 0
    try:
        while group := list(islice(remaining, together)):
            for batch, values in zip(group, logprobs(network, group, share_prefixes), strict=True):
                sums = document_sums(values.cpu(), batch.weights[0], batch.cu_seqlens).numpy()
                tokens = document_sums(torch.ones_like(batch.weights[0]), batch.weights[0], batch.cu_seqlens).numpy()
                document = 0
                for row in batch.rows:
                    if row.number in places:
                        here = slice(document, document + row.documents)
                        place = places[row.number], slice(0, row.documents)
                        found[0][place], found[1][place], found[2][place] = sums[here], tokens[here], 1.0
                        done += 1
                    document += row.documents
            if progress is not None:
                progress(min(done * ranks, len(numbers)), len(numbers))
    finally:
        model.train(was_training)
    if mesh is not None:
        found = mesh.sum(torch.from_numpy(found).to(network.device)).cpu().numpy()
    there = found[2] > 0
    return np.where(there, found[0], np.nan), np.where(there, found[1], np.nan)


def logprobs(network: Network, batches: Sequence[Batch], share_prefixes: bool) -> list[torch.Tensor]:
    """`logprobs_of`, for a model that reads one document at a time too."""
    if network.limits is not None:
        for batch in batches:
            network.limits.check(batch)
    if not network.packing_fault:
        return logprobs_of(network, batches, share_prefixes=share_prefixes)
    pieces = [apart(batch) for batch in batches]
    found = iter(logprobs_of(network, [piece for each in pieces for piece in each]))
    told = [[next(found) for _ in each] for each in pieces]
    return [torch.cat(values)[: batch.tokens] for batch, values in zip(batches, told, strict=True)]


def references(run: Run, rows: Rows, numbers: np.ndarray) -> np.ndarray:
    """Log-probabilities of the answers of rows under the run's reference, which are run once and kept by content.

    Args:
        run: on a layout all ranks call this together.
        rows: training or validation rows.
        numbers: which of them will be asked for.

    Returns:
        float64 [rows, WIDTH]; NaN for rows that nobody has asked for, and where a row has no such answer.

    Raises:
        NonFiniteError: the reference gives an answer a log-probability that is not finite; nothing is kept then.
    """
    group = dist.group.WORLD if run.state.mesh is not None else None
    with _reference_network(run) as (name, open_network):
        # without a cache in the run's own directory: what is found anew may differ in its last bits
        place = cache_directory() if run.config.data.cache else run.directory.path
        file = place / "reference" / f"{_key(run, rows, name)}.npy"
        known: np.ndarray = tell(_read(file, len(rows)) if run.state.is_main else None, group)
        wanted = np.unique(numbers)
        missing = wanted[np.isnan(known[wanted, 0])]
        if len(missing):
            network = open_network()
            with stage("asking the reference") as told:
                found = sums_of(
                    network,
                    rows,
                    missing,
                    sequence_length=run.config.data.sequence_length,
                    packing=run.config.data.packing and not network.packing_fault,
                    share_prefixes=shares_prompts(run),
                    progress=told,
                )
            known[missing] = _finite(*found, rows, missing)
            if run.state.is_main:
                _write(file, known)
        logger.info("reference: %d rows run, %d from the cache", len(missing), len(wanted) - len(missing))
    return known


def _finite(sums: np.ndarray, tokens: np.ndarray, rows: Rows, numbers: np.ndarray) -> np.ndarray:
    """What `sums_of` found of a reference, if all that there is of it is finite; all ranks come to the same.

    Raises:
        NonFiniteError: names the rows in which it is not.
    """
    bad = numbers[(~np.isfinite(sums) & ~np.isnan(tokens)).any(1)]
    if len(bad):
        shown = ", ".join(rows[int(number)].origin for number in bad[:8])
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise NonFiniteError(
            f"the reference gives answers log-probabilities that are not finite, in rows {shown}{more}",
            where="method.reference",
            remedy="look at the rows (luthier data show), or take another reference",
        )
    return sums


@contextmanager
def _reference_network(run: Run) -> Iterator[tuple[str, Callable[[], Network]]]:
    """The name of the reference, for the cache, and how to open it; nothing that is drawn on the way counts."""
    config, state = run.config, run.state
    drawn = randomness.capture()
    asked = config.method.reference  # type: ignore[union-attr]
    adapter = config.adapter
    try:
        if asked not in ("precomputed", "base"):
            other = config.model_copy(update={"model": asked, "revision": None, "adapter": None, "from_scratch": False})
            with named_in("method.reference"):
                if config.tokenizer is None:  # else rows have been given another one's tokens on purpose
                    require_same_tokens(asked, model_source(other), config, "method.reference")
                network = inference_network(other, state.device, None, state.mesh)
            group = dist.group.WORLD if state.mesh is not None else None
            yield model_digest(network.model, group) + config_digest(network.outline), lambda: network
            return
        name = str(run.of["model"]) + config_digest(state.outline)
        if adapter is not None and _is_switched_off(adapter):
            with without_adapters(state.model):
                yield name + json.dumps(adapter.model_dump(mode="json"), sort_keys=True), lambda: state
            return
        if adapter is not None and (adapter.kind != "lora" or adapter.start_from is not None):
            name += json.dumps(adapter.model_dump(mode="json"), sort_keys=True) + _files(adapter.start_from)
        if state.counters.step == 0:
            yield name, lambda: state  # it has not been trained yet
            return
        begin = Path(adapter.start_from) if adapter is not None and adapter.start_from is not None else None
        yield name, lambda: inference_network(config, state.device, begin, state.mesh)
    finally:
        randomness.restore(drawn)


def _is_switched_off(adapter: AdapterConfig) -> bool:
    """Whether the reference is the model at hand without its adapter: prompts change a model before they have learnt
    anything, and one that is opened again may be another (`LoraConfig.begins_as_another`): rows that are asked about
    before the first step and later, held-out ones or those of a resumed run, would be compared with two references."""
    if adapter.start_from is not None:
        return False
    return adapter.kind != "lora" or adapter.begins_as_another


@contextmanager
def as_before(run: Run) -> Iterator[None]:
    """Within, the model of a run is what it was before its first step, or its base where prompts are learned."""
    assert run.initial is not None
    adapter = run.config.adapter
    with ExitStack() as stack:
        if adapter is not None and adapter.kind != "lora" and adapter.start_from is None:
            stack.enter_context(without_adapters(run.state.model))
        else:
            stack.enter_context(run.initial.restored(run.state))
        yield


def _files(directory: str | None) -> str:
    if directory is None:
        return ""
    mark = hashlib.sha256()
    for file in sorted(Path(directory).glob("adapter_*")):
        mark.update(file.read_bytes())
    return mark.hexdigest()


def _key(run: Run, rows: Rows, name: str) -> str:
    decisive = [_VERSION, rows.fingerprint, name, str(run.state.head.dtype), str(run.state.outline.dtype)]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:40]


def _read(file: Path, rows: int) -> np.ndarray:
    nothing = np.full((rows, WIDTH), np.nan)
    try:
        kept = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return nothing
    return kept if kept.shape == nothing.shape and kept.dtype == nothing.dtype else nothing


def _write(file: Path, values: np.ndarray) -> None:
    """Aside, then renamed. A cache that cannot be written costs time alone."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as aside:
            np.save(aside, values, allow_pickle=False)
        Path(aside.name).replace(file)
    except OSError as error:
        logger.warning("the reference's log-probabilities cannot be kept (%s)", error)


def with_reference(run: Run, batches: Sequence[Batch]) -> list[Batch]:
    """Microbatches with the reference's log-probability of each document among their `inputs`; all ranks call it."""
    if run.initial is not None:
        state = run.state
        was_training = state.model.training
        state.model.eval()
        with as_before(run):
            told = logprobs(state, batches, shares_prompts(run))
        state.model.train(was_training)
        sums = [
            document_sums(found.cpu(), batch.weights[0], batch.cu_seqlens)
            for batch, found in zip(batches, told, strict=True)
        ]
        return [_with(batch, values) for batch, values in zip(batches, sums, strict=True)]
    if run.reference is None:
        assert isinstance(run.rows, Rows)
        run.reference = references(run, run.rows, run.loader.ahead())
    return [_with(batch, _looked_up(batch, run.reference)) for batch in batches]


def _looked_up(batch: Batch, known: np.ndarray) -> torch.Tensor:
    found: list[float] = []
    for row in batch.rows:
        found += known[row.number, : row.documents].tolist() if row.number >= 0 else [0.0] * row.documents
    values = torch.tensor(found, dtype=torch.float64)
    assert not values.isnan().any(), "the reference was not asked for a row of this batch"
    return values


def _with(batch: Batch, reference: torch.Tensor) -> Batch:
    return replace(batch, inputs={**batch.inputs, "reference": reference})


def held_out_sums(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Of the validation rows: log-probabilities of the answers, and their tokens (`sums_of`)."""
    assert run.held_out is not None
    data, rows = run.config.data, run.held_out
    with stage("evaluating") as told:
        return sums_of(
            run.state,
            rows,
            np.arange(len(rows)),
            sequence_length=data.sequence_length,
            packing=data.packing and not run.state.packing_fault,
            share_prefixes=shares_prompts(run),
            progress=told,
        )


def held_out_reference(run: Run) -> np.ndarray:
    """The reference's log-probabilities of the answers of the validation rows; of every row once a run."""
    assert run.held_out is not None
    rows = run.held_out
    if run.held_out_reference is None:
        numbers = np.arange(len(rows))
        if run.initial is not None:
            with as_before(run):
                run.held_out_reference = _finite(*held_out_sums(run), rows, numbers)
        else:
            run.held_out_reference = references(run, rows, numbers)
    return run.held_out_reference


def shares_prompts(run: Run) -> bool:
    """Whether the prompt of a row's answers is to be run once."""
    return bool(getattr(run.config.method, "share_prompt", True))


def totals(run: Run, values: Sequence[float]) -> list[float]:
    """Sums over the data ranks; all ranks call it."""
    told = torch.tensor(values, dtype=torch.float64)
    mesh = run.state.mesh
    result: list[Any] = (told if mesh is None else mesh.sum(told.to(run.state.device)).cpu()).tolist()
    return result
