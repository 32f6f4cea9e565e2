"""How likely texts go on in given ways, and whether each is the likeliest: what multiple-choice tasks ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from luthier.batch import Batch, Sample
from luthier.data.packing import best_fit
from luthier.engine.network import Network, require_readable
from luthier.hf.forward import hidden_states
from luthier.hf.head import head_logits
from luthier.losses.chunks import LOGITS_CHUNK


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text and how it goes on.

    Attributes:
        context: token ids, at least one.
        answer: token ids, at least one.
    """

    context: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """What the model reads to score it."""
        return (*self.context, *self.answer[:-1])


@dataclass(frozen=True, slots=True)
class Score:
    """What a model thinks of a continuation.

    Attributes:
        logprob: log-probability of the whole answer, nats.
        greedy: whether each of its tokens is the likeliest one in its place.
    """

    logprob: float
    greedy: bool


@torch.no_grad()
def score(
    network: Network,
    continuations: Sequence[Continuation],
    *,
    tokens_per_batch: int = 2048,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score continuations, several texts in one packed row; what several of them read alike is read once.

    Args:
        network: in one process. Its model is put into evaluation mode meanwhile, and back.
        continuations: in any order.
        tokens_per_batch: most tokens of a row; a longer text is a row of its own.
        progress: called with the continuations done so far.

    Returns:
        a score for each, in their order.

    Raises:
        DataError: a token or a length that the model does not have.
    """
    asked: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, one in enumerate(continuations):
        asked.setdefault((one.read, len(one.answer)), []).append(number)
    texts = list(asked)
    lengths = [len(read) for read, _ in texts]
    longest = max([tokens_per_batch, *lengths])
    bins = [[row] for row in range(len(texts))] if network.packing_fault else best_fit(lengths, longest)
    found: dict[int, Score] = {}
    training = network.model.training
    network.model.eval()
    try:
        done = 0
        for rows in bins:
            batch = Batch.pack([_sample(*texts[row]) for row in rows])
            require_readable(network, batch)
            hidden = hidden_states(network.model, batch.to(network.device))
            for row, end in zip(rows, batch.cu_seqlens[1:].tolist(), strict=True):
                read, size = texts[row]
                numbers = asked[read, size]
                answers = [continuations[number].answer for number in numbers]
                scores = _scores(network, hidden[end - size : end], answers)
                found |= dict(zip(numbers, scores, strict=True))
                done += len(numbers)
            if progress is not None:
                progress(done)
    finally:
        network.model.train(training)
    return [found[number] for number in range(len(continuations))]


def _sample(read: tuple[int, ...], size: int) -> Sample:
    return Sample.from_ids((*read, read[-1]), [0.0] * (len(read) + 1 - size) + [1.0] * size)


def _scores(network: Network, hidden: torch.Tensor, answers: Sequence[Sequence[int]]) -> list[Score]:
    """Of answers of one length that go on from the same text, by its last hidden states [answer length, hidden]."""
    targets = torch.tensor(answers, device=hidden.device)  # [answers, length]
    sums = torch.zeros(len(answers), dtype=torch.float64)
    greedy = torch.ones(len(answers), dtype=torch.bool)
    for start in range(0, len(hidden), LOGITS_CHUNK):
        part = slice(start, start + LOGITS_CHUNK)
        logits = head_logits(network.model, hidden[part])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        chosen = logits.gather(1, targets[:, part].t())  # [chunk, answers]
        sums += (chosen - logits.logsumexp(1, keepdim=True)).double().sum(0).cpu()
        greedy &= (chosen == logits.amax(1, keepdim=True)).all(0).cpu()
    return [Score(*pair) for pair in zip(sums.tolist(), greedy.tolist(), strict=True)]
