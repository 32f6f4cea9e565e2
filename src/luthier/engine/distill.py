"""A teacher beside the model: the divergence of the two, in chunks, its gradient made on the way.

Of the teacher only hidden states of positions that train are kept; its logits are made chunk by chunk beside the
student's, so neither's [tokens, vocabulary] is ever whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from luthier.batch import Batch
from luthier.engine.hidden import HiddenLoss
from luthier.engine.network import Network, counted, held, require_readable, summed, whole
from luthier.engine.state import TrainState
from luthier.hf.forward import hidden_states
from luthier.hf.head import head_logits
from luthier.losses import distill
from luthier.losses.chunks import LOGITS_CHUNK
from luthier.losses.cross_entropy import whole_logprobs
from luthier.parallel.tensor import vocabulary_shard

Said = Callable[[torch.Tensor], tuple[torch.Tensor | None, torch.Tensor]]
"""Places [m] -> the teacher's likeliest tokens [m, k], None for all of the vocabulary, and their log-probabilities."""


@torch.no_grad()
def _logprobs(
    model: Any, hidden: torch.Tensor, temperature: float, top_k: int | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    found = distill.shared_log_softmax(head_logits(model, hidden) / temperature, None)  # whole on every rank
    if top_k is None:
        return None, found
    best = found.topk(top_k)
    return best.indices, best.values


@torch.no_grad()
def likeliest(teacher: Network, batch: Batch, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's likeliest tokens and their log-probabilities at the positions of a batch that train, 0 at others.

    Args:
        teacher: whole, in evaluation mode.
        batch: T positions.
        top_k: how many tokens, no more than there are.
        temperature: of the distribution.

    Returns:
        int64 and float [T, top_k].
    """
    require_readable(teacher, batch)
    here = batch.padded(teacher.row_multiple).to(teacher.device)
    hidden, chosen = hidden_states(teacher.model, here), counted(here)
    ids = torch.zeros(batch.tokens, top_k, dtype=torch.int64, device=teacher.device)
    logprobs = torch.zeros(batch.tokens, top_k, dtype=teacher.head.dtype, device=teacher.device)
    for some in chosen.split(LOGITS_CHUNK):
        best, values = _logprobs(teacher.model, hidden[some], temperature, top_k)
        assert best is not None
        ids[some], logprobs[some] = best, values.to(logprobs.dtype)
    return ids, logprobs


@dataclass(frozen=True)
class Distillation(HiddenLoss):
    """Sum of weight x ((1 - share) divergence + share (-log p(target))).

    Attributes:
        teacher: a whole model of the same vocabulary, in evaluation mode; on a layout each rank has one. None where the
            batches bring along what it says, as `likeliest` gives it: `teacher_ids`, `teacher_logprobs` [T, top_k].
        kind: of the divergence (`losses.distill`).
        beta: of jsd.
        temperature: divides the logits of both before they are compared.
        cross_entropy: the share of the cross-entropy.
        top_k: compare the teacher's so many likeliest tokens, and all others together; None for the whole vocabulary.
    """

    teacher: Network | None
    kind: distill.Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    cross_entropy: float = 0.0
    top_k: int | None = None

    def score(
        self, state: TrainState, hidden: torch.Tensor, row: Batch, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `HiddenLoss`."""
        chosen = counted(row)  # [n]
        if chosen.numel() == 0:
            chosen = chosen.new_zeros(1)
        targets = row.targets[0, chosen].clamp(min=0)
        # a position that only takes part may lie in the padding, of which nobody says anything
        places = self._places(state, batch)[chosen].clamp(0, batch.tokens - 1)
        said = self._said(state, batch, places)
        loss, found = state.head.scored(hidden[chosen], row.weights[0, chosen], self._score(state, said, targets))
        values = found.new_zeros(row.tokens).index_put((chosen,), found)
        return summed(state, loss), whole(state, values, batch)

    def _said(self, state: TrainState, batch: Batch, places: torch.Tensor) -> Said:
        """What the teacher says at some positions of a microbatch, for some of them at a time."""
        if self.teacher is None:
            ids, logprobs = (batch.inputs[name][places] for name in ("teacher_ids", "teacher_logprobs"))
            return lambda some: (ids[some].long(), logprobs[some])
        require_readable(self.teacher, batch)
        model = self.teacher.model
        with torch.no_grad():
            hidden = hidden_states(model, batch.padded(state.row_multiple).to(self.teacher.device))[places]
        return lambda some: _logprobs(model, hidden[some], self.temperature, self.top_k)

    @staticmethod
    def _places(state: TrainState, batch: Batch) -> torch.Tensor:
        """int64, where each position of this rank's part of a padded microbatch stands in the whole."""
        padded = batch.padded(state.row_multiple)
        numbers = torch.arange(padded.tokens, device=padded.input_ids.device)[None]
        return held(state, replace(padded, targets=numbers)).targets[0]

    def _score(
        self, state: TrainState, said: Said, targets: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """score(logits of a chunk, its places among the n) -> [m], the negative loss of each."""
        shard = vocabulary_shard(state.model)
        logprobs = whole_logprobs if shard is None else shard.logprobs
        group = None if shard is None else shard.group

        def score(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            ids, teacher = said(places)
            cooled = logits / self.temperature
            if ids is not None:
                student = distill.with_rest(logprobs(cooled, ids))
                found = distill.divergence(student, distill.with_rest(teacher.to(student)), self.kind, self.beta)
            else:
                if shard is not None:
                    teacher = teacher[:, shard.offset : shard.offset + logits.shape[-1]]
                student = distill.shared_log_softmax(cooled, group)
                own = distill.divergence(student, teacher.to(student.dtype), self.kind, self.beta)
                found = distill.summed(own, group)
            if not self.cross_entropy:
                return -found
            return self.cross_entropy * logprobs(logits, targets[places]) - (1 - self.cross_entropy) * found

        return score
