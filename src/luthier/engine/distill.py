"""A teacher beside the model: the divergence of the two, in chunks, its gradient made on the way.

Of the teacher only hidden states of positions that train are kept; its logits are made chunk by chunk beside the
student's, so neither's [tokens, vocabulary] is ever whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from luthier.batch import Batch
from luthier.engine.hidden import HiddenLoss
from luthier.engine.network import Network, counted, held, summed, whole
from luthier.engine.state import TrainState
from luthier.hf.forward import hidden_states
from luthier.hf.head import head_logits
from luthier.losses import distill
from luthier.losses.cross_entropy import whole_logprobs
from luthier.parallel.tensor import vocabulary_shard


@dataclass(frozen=True)
class Distillation(HiddenLoss):
    """Sum of weight x ((1 - share) divergence + share (-log p(target))).

    Attributes:
        teacher: a whole model of the same vocabulary, in evaluation mode; on a layout each rank has one.
        kind: of the divergence (`losses.distill`).
        beta: of jsd.
        temperature: divides the logits of both before they are compared.
        cross_entropy: the share of the cross-entropy.
        top_k: compare the teacher's so many likeliest tokens, and all others together; None for the whole vocabulary.
    """

    teacher: Network
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
        taught = self._taught(state, batch)[self._places(state, batch)[chosen]]
        loss, found = state.head.scored(hidden[chosen], row.weights[0, chosen], self._score(state, taught, targets))
        values = found.new_zeros(row.tokens).index_put((chosen,), found)
        return summed(state, loss), whole(state, values, batch)

    @torch.no_grad()
    def _taught(self, state: TrainState, batch: Batch) -> torch.Tensor:
        """[positions, hidden] of the teacher for the whole padded microbatch."""
        return hidden_states(self.teacher.model, batch.padded(state.row_multiple).to(self.teacher.device))

    @staticmethod
    def _places(state: TrainState, batch: Batch) -> torch.Tensor:
        """int64, where each position of this rank's part of a padded microbatch stands in the whole."""
        padded = batch.padded(state.row_multiple)
        numbers = torch.arange(padded.tokens, device=padded.input_ids.device)[None]
        return held(state, replace(padded, targets=numbers)).targets[0]

    def _score(
        self, state: TrainState, taught: torch.Tensor, targets: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """score(logits of a chunk, its places among the n) -> [m], the negative loss of each."""
        shard = vocabulary_shard(state.model)
        logprobs = whole_logprobs if shard is None else shard.logprobs
        group = None if shard is None else shard.group

        def score(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = head_logits(self.teacher.model, taught[places])
                teacher = distill.shared_log_softmax(teacher / self.temperature, None)  # it is whole on every rank
            cooled = logits / self.temperature
            if self.top_k is not None:
                best = teacher.topk(min(self.top_k, teacher.shape[-1]))
                student = distill.with_rest(logprobs(cooled, best.indices))
                found = distill.divergence(student, distill.with_rest(best.values), self.kind, self.beta)
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
