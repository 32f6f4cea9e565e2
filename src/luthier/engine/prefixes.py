"""Prompts that two answers share, run once: forward and backward.

A row of data holds each answer with its prompt in front. For the model the beginning that both have is laid once, and
either answer goes on from it: n + a + b positions instead of 2 n + a + b. Attention keeps the answers apart
(`hf/rows/documents.py`); everything else in a layer sees single positions. What the backbone makes of the shared row is
then read off for every position of the original one, where the head and the loss find what they would have found
without sharing; gradients of a shared position add up on the way back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from luthier.batch import NO_TOKEN, Batch, Sample
from luthier.engine.network import Network, held
from luthier.errors import ModelError, first_line
from luthier.hf.anatomy import stateful_part
from luthier.hf.debug.small import kind_of, make_small
from luthier.hf.forward import hidden_states, masks_itself
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.rows.attention import NAME
from luthier.hf.rows.rotary import depends_on_length
from luthier.hf.rows.virtual import has_virtual

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Root mean square of the difference over that of the hidden states; what is out of place is off by far more."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A batch as the model runs it.

    Attributes:
        row: in which beginnings lie once; nothing in it trains.
        index: int64 [T], for each position of the original batch, where it lies in the row.
    """

    row: Batch
    index: torch.Tensor

    def to(self, device: torch.device | str) -> Shared:
        return Shared(self.row.to(device), self.index.to(device))


def share(batch: Batch) -> Shared | None:
    """Lay what the answers of each row begin with once.

    >>> ids = [np.array(text) for text in ([1, 2, 3, 4], [1, 2, 3, 5, 6])]
    >>> pair = Sample.join([Sample.from_ids(i, np.ones(len(i))) for i in ids])
    >>> shared = share(Batch.pack([pair]))
    >>> shared.row.input_ids.tolist(), shared.row.parents, shared.index.tolist()
    ([[1, 2, 3, 3, 5]], (-1, 0, 0), [0, 1, 2, 0, 1, 3, 4])

    Args:
        batch: on the host.

    Returns:
        None where nothing is shared.
    """
    ids = batch.input_ids[0].numpy()
    bounds: list[int] = batch.cu_seqlens.tolist()
    spans = list(pairwise(bounds))
    pieces: list[tuple[int, int]] = []  # of the original row, as they lie in the new one
    parents: list[int] = []
    index = np.empty(len(ids), np.int64)
    place = document = 0

    def lay(start: int, stop: int, parent: int = -1) -> int:
        nonlocal place
        pieces.append((start, stop))
        parents.append(parent)
        index[start:stop] = np.arange(place, place + stop - start)
        place += stop - start
        return len(pieces) - 1

    for unit in batch.rows:
        own = spans[document : document + unit.documents]
        document += unit.documents
        same = _alike([ids[start:stop] for start, stop in own]) if len(own) > 1 else 0
        if not same:
            for start, stop in own:
                lay(start, stop)
            continue
        first = own[0][0]
        root = lay(first, first + same)
        for start, stop in own:
            index[start : start + same] = index[first : first + same]
            lay(start + same, stop, root)
    for start, stop in spans[document:]:  # what nobody says anything of
        lay(start, stop)
    if all(parent < 0 for parent in parents):
        return None
    order = torch.from_numpy(np.concatenate([np.arange(start, stop) for start, stop in pieces]))
    lengths = [stop - start for start, stop in pieces]
    tokens = batch.input_ids[:, order]
    made = replace(
        batch,
        input_ids=tokens,
        position_ids=batch.position_ids[:, order],
        targets=torch.full_like(tokens, NO_TOKEN),
        weights=torch.zeros(tokens.shape, dtype=batch.weights.dtype),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32),
        origins=(),
        inputs={},
        rows=(),
        parents=tuple(parents),
    )
    return Shared(made, torch.from_numpy(index))


def shared_of(network: Network, batches: Sequence[Batch], wanted: bool) -> list[Shared | None]:
    """How each batch runs: with its prompts shared where that is wanted, this model can, and there are any."""
    if not wanted or prefix_fault(network):
        return [None] * len(batches)
    found = [share(batch) if batch.sights is None else None for batch in batches]
    return [None if one is None else one.to(network.device) for one in found]


def laid(network: Network, batch: Batch, shared: Shared | None, multiple: int = 1) -> Batch:
    """What the backbone is run on for a batch: its row, or this rank's part of it, padded to a multiple."""
    return held(network, batch.padded(multiple)) if shared is None else shared.row.padded(multiple)


def read_off(hidden: torch.Tensor, row: Batch, batch: Batch, shared: Shared | None) -> tuple[torch.Tensor, Batch]:
    """Hidden states, and the positions that they are of, from those of the row that was run."""
    return (hidden, row) if shared is None else (hidden[shared.index], batch)


def _alike(documents: list[np.ndarray]) -> int:
    """How many tokens all begin with; at least one is left to each."""
    most = min(len(document) for document in documents) - 1
    differ = np.zeros(max(most, 0), bool)
    for document in documents[1:]:
        differ |= document[:most] != documents[0][:most]
    found = np.flatnonzero(differ)
    return int(found[0]) if len(found) else max(most, 0)


def prefix_fault(network: Network) -> str:
    """Why this model runs the prompt of each answer by itself, as a clause; empty where prompts are shared.

    What can be told from the layout and the structure is; the rest is tried on a small model of its kind. Said once.
    """
    if network.prefix_fault is None:
        network.prefix_fault = _fault(network)
        if network.is_main and network.prefix_fault:
            logger.info("prompts are run with each answer, not once: %s", network.prefix_fault)
    return network.prefix_fault


def _fault(network: Network) -> str:
    model: Any = network.model
    name = type(network.outline).__name__
    if network.mesh is not None and network.mesh.cp is not None:
        return "under context parallelism each rank holds a part of the row"
    if network.balance is not None:
        return "the load of experts is counted by tokens, and a shared one would count once"
    if has_virtual(model):
        return "what is learned in the place of text stands before every document"
    if network.packing_fault:
        return f"{name} cannot hold several documents in a row: {network.packing_fault}"
    if masks_itself(model) or network.outline.config._attn_implementation != NAME:
        return f"{name} runs with an attention that is not Luthier's"
    stateful = stateful_part(network.outline)
    if stateful is not None:
        return f"{name} has {stateful}, through which each position sees those before it in the row"
    if depends_on_length(network.outline):
        return f"the rotary frequencies of {name} depend on how long each document is"
    try:
        small = make_small(kind_of(copy.copy(network.outline)))
        return "" if is_exact(small) else f"{name} gives other hidden states when a prompt is shared"
    except (ModelError, *RAISED_BY_MODELS) as error:
        return f"{name} refuses a row with a shared prompt ({first_line(error)})"


@torch.no_grad()
def is_exact(model: Any) -> bool:
    """Whether a model's hidden states are the same with prompts shared and without, on a few short pairs.

    Args:
        model: loaded; its mode is left as it was.
    """
    embedding = model.get_input_embeddings().weight
    draw = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return draw.integers(0, embedding.shape[0], length)

    samples = []
    for prompt, answers in ((9, (5, 8)), (3, (13, 2)), (17, (4, 4))):
        begin = ids(prompt)
        documents = [np.concatenate([begin, ids(length)]) for length in answers]
        samples.append(Sample.join([Sample.from_ids(d, np.ones(len(d))) for d in documents]))
    batch = Batch.pack(samples)
    shared = share(batch)
    assert shared is not None
    was_training = model.training
    model.eval()
    try:
        alone = hidden_states(model, batch.to(embedding.device)).double()
        together = hidden_states(model, shared.row.to(embedding.device))[shared.index.to(embedding.device)].double()
    finally:
        model.train(was_training)
    difference = (together - alone).square().mean().sqrt() / alone.square().mean().sqrt().clamp(min=1e-12)
    return bool(difference <= _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16]))
