"""What the model answers while it trains, and what that is worth: prompts -> groups of answers with rewards."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from luthier.batch import Batch
from luthier.config import RunConfig
from luthier.config.reinforcement import GrpoConfig
from luthier.engine.build import build_network
from luthier.engine.state import TrainState
from luthier.recipes.generate import stops_of
from luthier.recipes.rewards import call_reward, load_rewards
from luthier.recipes.setup import model_source, new_tokens_of
from luthier.sampling.engine import SLOTS, SamplingEngine
from luthier.sampling.request import SamplingRequest, SamplingResult


@dataclass
class Group:
    """The answers to one prompt.

    Attributes:
        prompt: its token ids.
        origin: where its row stands.
        row: its columns; `prompt` is text or messages.
        answers: what was sampled.
        by_function: float64 [answers, functions], NaN where a function has no say.
        rewards: float64 [answers], their weighted sum; NaN where no function has a say.
        tries: how often the group was sampled.
    """

    prompt: list[int]
    origin: str
    row: Mapping[str, Any] = field(default_factory=dict)
    answers: list[SamplingResult] = field(default_factory=list)
    by_function: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    tries: int = 0

    @property
    def equal(self) -> bool:
        """Whether no answer is better than another, so that the group teaches nothing."""
        known = self.rewards[~self.rewards.isnan()]
        return len(known) == 0 or bool((known == known[0]).all())


class Rollouts:
    """Samples a group of answers to each prompt of a step and asks the rewards about them.

    Args:
        config: of the run; its `method` is grpo.
        state: what trains, and with whose weights of the moment is sampled.

    Raises:
        ConfigError: a reward cannot be imported.
    """

    def __init__(self, config: RunConfig, state: TrainState) -> None:
        assert isinstance(config.method, GrpoConfig)
        self._method, self._seed = config.method, config.seed
        self.functions = load_rewards(config.method.rewards)
        self._weights = torch.tensor(config.method.weights or [1.0] * len(self.functions), dtype=torch.float64)
        self._model, self.refresh = _sampled_model(config, state)
        self._tokenizer = state.tokenizer
        self._stops = stops_of(self._model, self._tokenizer)
        self._engine = SamplingEngine(self._model, tokenizer=self._tokenizer, slots=SLOTS)

    def __call__(self, batches: Sequence[Batch], step: int) -> list[Group]:
        """The groups of this rank's prompts.

        Args:
            batches: rows of format `prompt`.
            step: the number of steps before this one; with the prompt it decides what is sampled.
        """
        self.refresh()
        groups = [group for batch in batches for group in _groups(batch)]
        seen: Counter[tuple[int, ...]] = Counter()
        places = []
        for group in groups:
            places.append(seen[tuple(group.prompt)])
            seen[tuple(group.prompt)] += 1
        left = list(zip(groups, places, strict=True))
        for _ in range(1 + self._method.resample):
            self._sample(left, step)
            left = [(group, place) for group, place in left if group.equal]
        return groups

    def _sample(self, asked: Sequence[tuple[Group, int]], step: int) -> None:
        """Answers to each prompt, in the place of those that are there."""
        method, size = self._method, self._method.group_size
        ends: Any = [*self._stops, *method.stop]  # token ids and strings together
        requests = [
            request
            for group, place in asked
            for request in SamplingRequest(
                group.prompt,
                method.max_new_tokens,
                temperature=method.temperature,
                top_k=method.top_k,
                top_p=method.top_p,
                seed=_seed_of(self._seed, step, group.prompt, place, group.tries),
                stop=ends,
            ).group(size)
        ]
        found = self._engine.sample(requests)
        for number, (group, _) in enumerate(asked):
            group.answers = found[number * size : (number + 1) * size]
            group.tries += 1
        self._reward([group for group, _ in asked])

    def _reward(self, groups: Sequence[Group]) -> None:
        if not groups:
            return
        prompts, completions, ids, origins = [], [], [], []
        columns: dict[str, list[Any]] = {}
        for group in groups:
            row = {name: value for name, value in group.row.items() if name != "prompt"}
            prompt = group.row["prompt"]
            for answer in group.answers:
                text = str(self._tokenizer.decode(answer.tokens, skip_special_tokens=True))
                prompts.append(prompt)
                completions.append(text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
                ids.append(answer.tokens)
                origins.append(group.origin)
            for name in {**columns, **row}:
                column = columns.setdefault(name, [None] * (len(prompts) - len(group.answers)))
                column += [row.get(name)] * len(group.answers)
        found = [
            call_reward(name, function, prompts, completions, ids, columns, origins)
            for name, function in self.functions.items()
        ]
        values = torch.tensor(found, dtype=torch.float64).T.reshape(len(groups), -1, len(found))
        for group, each in zip(groups, values, strict=True):
            group.by_function = each
            silent = each.isnan().all(1)
            group.rewards = torch.where(silent, torch.nan, (each * self._weights).nansum(1))


def _seed_of(seed: int, step: int, prompt: Sequence[int], place: int, tried: int) -> int:
    """Follows from the run, the step and the prompt: not from the rank, nor from what else is sampled."""
    text = f"{seed}:{step}:{place}:{tried}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _groups(batch: Batch) -> Iterator[Group]:
    """A group without answers for each row of a batch."""
    ids = batch.input_ids[0].tolist()
    for (start, end), origin, row in zip(pairwise(batch.cu_seqlens.tolist()), batch.origins, batch.rows, strict=True):
        if row.meta:  # not the single position of a rank that just takes part
            yield Group(ids[start:end], origin, row.meta)


def _sampled_model(config: RunConfig, state: TrainState) -> tuple[Any, Callable[[], None]]:
    """The model that samples, and what brings its weights up to date.

    One process samples from the very model that trains. On a layout of data ranks each has a whole copy beside its
    shards; what trains is gathered into it, and nothing is written to disk.
    """
    if state.mesh is None:
        return state.model, lambda: None
    copy = build_network(
        model_source(config),
        adapter=config.adapter,
        tokens=new_tokens_of(config),
        precision=config.train.precision,
        device=state.device,
        attention=config.train.attention,
        from_scratch=config.from_scratch,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
    ).model
    copy.requires_grad_(False)
    places = dict(copy.named_parameters())

    @torch.no_grad()
    def refresh() -> None:
        for name, parameter in state.trainable.items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            places[name].copy_(whole)

    return copy, refresh
