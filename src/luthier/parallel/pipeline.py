"""Pipeline parallelism: each rank holds some stages of the model, and microbatches pass through all of them.

`cut` takes away, on meta, what other ranks hold; `Pipeline` runs torch's schedules over what is left. Every rank has
the same microbatches: what passes between stages is the hidden states alone, and a number tells each stage which
microbatch they are of. The last stage runs the head and the loss, given by the caller, inside its own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from luthier.batch import NO_TOKEN, Batch, Sample
from luthier.errors import ConfigError
from luthier.hf.gather import local_part, reshard
from luthier.parallel.balance import Part, balance
from luthier.parallel.cuttable import roles_of
from luthier.parallel.programs import PROGRAMS, Program, stages_of
from luthier.parallel.stages import TOKENS, Roles, copies, costs, remove_others, run

Score = Callable[[torch.Tensor, Batch, int], tuple[torch.Tensor, torch.Tensor]]
"""(hidden [T, hidden], batch, number) -> the loss, a scalar, and log-probabilities [any]; run by the last stage. Of
microbatches beyond those given, which fill a schedule, the weights are 0."""
Result = tuple[torch.Tensor, torch.Tensor]
"""Loss and log-probabilities of a microbatch, without gradient."""


@dataclass(slots=True)
class _Work:
    """What the stages of a rank work on."""

    batches: Sequence[Batch] = ()
    length: int = 0
    """What is handed on is filled up to so many positions: torch takes one shape for all microbatches of a step."""
    score: Score | None = None
    scores: dict[int, Result] = field(default_factory=dict)


class Stage(nn.Module):
    """One stage: the root under which its weights are sharded, and the module that torch's schedules call.

    The names of its weights are those in the model, which it does not change.

    Attributes:
        layers: its layers, in order.
    """

    model: Any
    roles: Roles
    part: Part
    stand_ins: dict[str, nn.Module]
    work: _Work

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        part: Part,
        stand_ins: dict[str, nn.Module],
        names: Sequence[str],
        work: _Work,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in names)
        # beside the registered modules, since this one is inside the model and the model is not inside this one
        self.__dict__.update(model=model, roles=roles, part=part, stand_ins=stand_ins, work=work)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        part = self.part
        return tuple(self.model.get_submodule(name) for name in self.roles.layers[part.start : part.stop])

    def forward(self, received: torch.Tensor | None, *, microbatch: torch.Tensor) -> torch.Tensor:
        """Hidden states for the next stage; on the last, the loss of the microbatch."""
        number = int(microbatch)
        batch = self.work.batches[number]
        axis = self.roles.shape.index(TOKENS)
        given = None if self.part.is_first or received is None else received.narrow(axis, 0, batch.tokens)
        hidden = run(self.model, self.roles, self.part, self.stand_ins, batch, given)
        if not self.part.is_last:
            assert hidden.dtype == self.roles.dtype, f"{hidden.dtype} is handed on, {self.roles.dtype} expected"
            if batch.tokens < self.work.length:
                after = [0, 0] * (hidden.dim() - 1 - axis)
                hidden = F.pad(hidden, (*after, 0, self.work.length - batch.tokens))
            if torch.is_grad_enabled() and not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_(True)  # all before is frozen, yet a gradient is sent here
            return hidden.contiguous()
        assert self.work.score is not None
        loss, logprobs = self.work.score(hidden, batch, number)
        self.work.scores[number] = (loss.detach(), logprobs.detach())
        return loss


@dataclass(frozen=True, slots=True)
class Cut:
    """What `cut` made of a model.

    Attributes:
        program: the schedule.
        parts: every stage of the model.
        ranks: the rank of the pipeline that holds each.
        stages: those of this rank, in order; each is sharded as a root of its own.
        layers: names of this rank's layers.
        copies: names of weights that an earlier stage owns and this rank has a copy of (a tied embedding): not counted
            in the norm, not exported.
        roles: of the modules of the whole model.
        tied: names of weights that the first and the last stage both have, on different ranks, whose gradients are
            summed over both (`Pipeline.settle`); the same on every rank.
    """

    program: Program
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    stages: tuple[Stage, ...]
    layers: tuple[str, ...]
    copies: frozenset[str]
    roles: Roles
    tied: tuple[str, ...]
    work: _Work


def cut(
    model: Any,
    mesh: DeviceMesh,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    compiled: bool = False,
) -> Cut:
    """Leave of a model on meta what this rank's stages run, in place. Names of weights stay as they are.

    Args:
        model: whole, adapters in place; `cuttable.refusal` has found nothing against it.
        mesh: the ranks of the pipeline, one-dimensional.
        schedule: a name of `programs.PROGRAMS`.
        stages_per_rank: for schedules that leave the choice.
        compiled: its layers will be.

    Raises:
        ConfigError: the schedule takes another number of stages, or no compiled layers.
    """
    program = PROGRAMS[schedule]
    each = stages_of(schedule, stages_per_rank)
    if compiled and program.splits_backward:
        raise ConfigError(
            f"{schedule} makes gradients of inputs and of weights at different times, and compiled layers both at once",
            where="parallel.pipeline_schedule",
            remedy="set it to 1f1b or interleaved_1f1b, or leave train.compile out",
        )
    roles = roles_of(model)
    parts = balance(*costs(model, roles), stages=mesh.size() * each)
    ranks = program.ranks_of_stages(mesh.size(), each)
    mine = [part for part in parts if ranks[part.index] == mesh.get_local_rank()]
    tied = _tied(model, roles) if ranks[0] != ranks[-1] else ()
    stand_ins = remove_others(model, roles, mine)
    spare = copies(model, roles, mine)
    work = _Work()
    stages = []
    for part in mine:
        beside = {name.rpartition(".")[0] for name in spare} if part.is_last else set()
        names = [name for name in stand_ins if name in roles.of(part) or name in beside]
        stages.append(Stage(model, roles, part, stand_ins, names, work))
    layers = tuple(name for part in mine for name in roles.layers[part.start : part.stop])
    return Cut(program, parts, ranks, tuple(stages), layers, spare, roles, tied, work)


def _tied(model: Any, roles: Roles) -> tuple[str, ...]:
    """Names of weights before the layers that a module after them is tied to."""
    pairs = getattr(model, "all_tied_weights_keys", {}).items()
    return tuple(
        sorted({owner for target, owner in pairs if _module(owner) in roles.before and _module(target) in roles.after})
    )


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


class Pipeline:
    """Runs microbatches through the stages of all ranks, which all make each call with the same ones.

    Args:
        model: cut, with its weights.
        cut: what `cut` returned.
        mesh: the ranks of the pipeline.
        device: of this rank.
        dtype: of the model's weights.
        width: size of hidden states.
    """

    def __init__(
        self,
        model: Any,
        cut: Cut,
        mesh: DeviceMesh,
        *,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        self._model, self._cut, self._device = model, cut, device
        self._group = mesh.get_group()
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self._dtype, self._width = dtype, width
        self._settled = True
        self._built: tuple[tuple[int, int], Any] | None = None

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return self._ranks

    @property
    def copies(self) -> frozenset[str]:
        """Names of this rank's weights that an earlier stage owns."""
        return self._cut.copies

    def forward_backward(self, batches: Sequence[Batch], score: Score) -> list[Result]:
        """Run microbatches forward and backward by the schedule, adding gradients to those already there.

        A schedule that needs more of them is given copies of the shortest that count nothing.

        Args:
            batches: of whatever lengths, on this rank's device, in the order in which gradients are to be summed.
            score: run by the last stage; its losses are sums that have been normalised already.

        Returns:
            loss and log-probabilities of each microbatch, the same on every rank.
        """
        cut, self._settled = self._cut, False
        count = cut.program.microbatches(len(batches), self._ranks, len(cut.stages))
        short, length = min(batches, key=_tokens), max(map(_tokens, batches))
        nothing = torch.full_like(short.targets, NO_TOKEN)
        empty = replace(short, targets=nothing, weights=torch.zeros_like(short.weights))
        with self._working_on([*batches, *[empty] * (count - len(batches))], score, length):
            schedule = self._schedule(count, length)
            numbers = torch.arange(count)
            first = (numbers,) if cut.ranks[0] == self._rank else ()
            schedule.step(*first, microbatch=numbers, target=numbers, return_outputs=False)
            return self._shared(len(batches))

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], score: Score) -> list[Result]:
        """Run microbatches, of whatever lengths, forward only.

        Args:
            batches: on this rank's device.
            score: run by the last stage.

        Returns:
            as `forward_backward`.
        """
        cut = self._cut
        handed: dict[int, list[torch.Tensor]] = {}  # what the stages of this rank give, by stage
        sent: list[Any] = []
        with self._working_on(batches, score):
            for stage in cut.stages:
                part = stage.part
                outputs = []
                for number, batch in enumerate(batches):
                    received = None
                    if not part.is_first and cut.ranks[part.index - 1] == self._rank:
                        received = handed[part.index - 1][number]
                    elif not part.is_first:
                        received = self._blank(batch.tokens, self._device)
                        dist.recv(received, group=self._group, group_src=cut.ranks[part.index - 1])
                    output = stage(received, microbatch=torch.tensor([number]))
                    if not part.is_last and cut.ranks[part.index + 1] != self._rank:
                        sent.append(
                            (dist.isend(output, group=self._group, group_dst=cut.ranks[part.index + 1]), output)
                        )
                    elif not part.is_last:
                        outputs.append(output)
                handed[part.index] = outputs
            for work, _ in sent:
                work.wait()
            for stage in cut.stages:
                reshard(stage)  # no backward pass comes to give the gathered weights back
            return self._shared(len(batches))

    @torch.no_grad()
    def run_alone(self) -> None:
        """Run this rank's stages on two tokens and on zeros for what they would receive, to see what calls what. The
        ranks that share its stages call it together."""
        ids = np.array([0, 1, 0])
        batch = Batch.pack([Sample.from_ids(ids, np.ones(3))]).to(self._device)
        received = self._blank(batch.tokens, self._device).zero_()
        with self._working_on([batch], lambda hidden, batch, number: (hidden.sum(), hidden)):
            for stage in self._cut.stages:
                stage(received, microbatch=torch.zeros(1, dtype=torch.int64))
                reshard(stage)  # or an optimizer made now would be of the gathered weights, which do not last

    def settle(self) -> None:
        """Sum the gradients of weights that the first and the last stage share. Once a step, by all ranks, after
        `norm.settle`; both sides get the same bits. Until the next backward pass another call changes nothing."""
        if self._settled:
            return
        self._settled = True
        ends = (self._cut.ranks[0], self._cut.ranks[-1])
        if self._rank not in ends:
            return
        other = ends[1] if self._rank == ends[0] else ends[0]
        for name in self._cut.tied:
            parameter = self._model.get_parameter(name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            theirs = torch.empty_like(own)
            exchange = [
                dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own.add_(theirs)

    @contextmanager
    def _working_on(self, batches: Sequence[Batch], score: Score, length: int = 0) -> Iterator[None]:
        work = self._cut.work
        work.batches, work.length, work.score, work.scores = batches, length, score, {}
        try:
            yield
        finally:
            work.batches, work.score, work.scores = (), None, {}

    def _schedule(self, count: int, positions: int) -> Any:
        """torch's schedule for so many microbatches of this length; another length makes other buffers."""
        if self._built is None or self._built[0] != (count, positions):
            cut = self._cut
            # told rather than found out, since torch would run a microbatch to find out
            hidden = self._blank(positions, "meta").requires_grad_(True)
            number = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=self._dtype, device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    stage,
                    stage.part.index,
                    len(cut.parts),
                    self._device,
                    input_args=number if stage.part.is_first else hidden,
                    output_args=loss if stage.part.is_last else hidden,
                    group=self._group,
                )
                for stage in cut.stages
            ]
            self._built = (count, positions), cut.program.build(stages, count, lambda loss, number: loss)
        return self._built[1]

    def _blank(self, positions: int, device: torch.device | str) -> torch.Tensor:
        """Room for hidden states between stages."""
        roles = self._cut.roles
        return torch.empty(roles.shape_of(positions, self._width), dtype=roles.dtype, device=device)

    def _shared(self, count: int) -> list[Result]:
        """What the last stage found of the first `count` microbatches, told to all ranks."""
        source = self._cut.ranks[-1]
        found = [self._cut.work.scores[number] for number in range(count)] if self._rank == source else []
        lengths = torch.zeros(count, dtype=torch.int64, device=self._device)
        if found:
            lengths.copy_(torch.tensor([logprobs.numel() for _, logprobs in found]))
        dist.broadcast(lengths, group=self._group, group_src=source)
        sizes = lengths.tolist()
        values = torch.zeros(count + sum(sizes), dtype=torch.float64, device=self._device)
        if found:
            parts = [*(loss.reshape(1) for loss, _ in found), *(logprobs.flatten() for _, logprobs in found)]
            torch.cat(parts, out=values)
        dist.broadcast(values, group=self._group, group_src=source)
        dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        several = self._cut.work.batches[0].targets.shape[2:]  # targets a position, where there is more than one
        logprobs = [part.unflatten(0, (-1, *several)) for part in values[count:].to(dtype).split(sizes)]
        return list(zip(values[:count].unbind(), logprobs, strict=True))


def _tokens(batch: Batch) -> int:
    return batch.tokens
