"""Expert parallelism: every rank of `ep` holds some of the experts whole, and tokens travel to them and back.

Ranks of tensor parallelism hold the same tokens, so each sends a part of them; all other ranks hold tokens of their
own. Only two exchanges a layer move rows (to the experts, and their answers back), and one moves counts. The weights
with which a token sums its experts' answers stay at home, and so does their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from luthier.hf.experts import Experts, find_experts
from luthier.parallel.mesh import Mesh


def refusal(model: nn.Module, degree: int) -> str | None:
    """Why a model's experts cannot be dealt to as many ranks; None where they can.

    Args:
        model: a Transformers model, perhaps on meta.
        degree: ranks of ep.
    """
    experts = find_experts(model)
    if not experts:
        return "it has no experts"
    for group in experts:
        weights = dict(model.get_submodule(group.name).named_parameters())
        ragged = next((key for key in group.shared if weights[key].dim() > 1), None)
        if ragged is not None:
            return f"{group.name}.{ragged} holds another number of experts than the weights beside it"
        if any(weights[key].shape[0] % degree for key in group.sliced) or group.count % degree:
            return f"its {group.count} experts cannot be dealt to {degree} ranks evenly"
    return None


def dealt_whole(model: nn.Module, mesh: Mesh) -> list[Experts]:
    """The experts that `shard` deals out, so that tensor parallelism must not cut them: with `ep` all. Without, those
    that carry adapters, over the ranks of tp where their number allows it: no matrix of an expert's adapter is cut."""
    return [group for group in find_experts(model) if mesh.ep is not None or (mesh.tp is not None and group.adapted)]


def shard(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Deal the experts of a model on meta to ranks, in place, and let tokens travel.

    Args:
        model: adapters in place; nothing has cut those of its experts that `dealt_whole` names.
        mesh: its `tp` ranks lie within one group of ep.

    Returns:
        the modules whose weights FSDP shards over `mesh.efsdp` and no other mesh.
    """
    ring = mesh.ep or mesh.tp
    modules = []
    for group in dealt_whole(model, mesh):
        assert ring is not None
        if group.count % ring.size():
            continue  # each rank of tp keeps them whole
        module = model.get_submodule(group.name)
        for key in (*group.sliced, *group.shared):
            _distribute(module, key, ring, Shard(0) if key in group.sliced else Replicate())
        if hasattr(module, "num_experts"):
            module.num_experts = group.count // ring.size()  # type: ignore[assignment]
        exchange = _Exchange(module, group, ring, mesh.tp)
        module.forward = getattr(exchange, group.call)
        modules.append(module)
    return modules if mesh.ep is not None else []


def _distribute(module: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor; on meta nothing is sent."""
    owner_name, _, name = key.rpartition(".")
    owner = module.get_submodule(owner_name)
    whole = owner.get_parameter(name)
    part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
    owner.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


class _Exchange:
    """Stands in the place of the forward of one module of experts: called as it is, with the same result.

    Args:
        module: its experts are dealt to the ranks of `ep`, in order.
        group: what it was before.
        ep: the ranks that share the experts.
        tp: ranks that hold the same tokens, None where there are none.
    """

    def __init__(self, module: nn.Module, group: Experts, ep: DeviceMesh, tp: DeviceMesh | None) -> None:
        self.module, self.inner = module, module.forward
        self.ep, self.tp, self.local = ep, tp, group.count // ep.size()
        self.shared = frozenset(group.shared)

    def routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What chosen experts make of tokens.

        Args:
            hidden_states: [..., hidden], T tokens.
            top_k_index: int64 [T, k], each token's experts.
            top_k_weights: [T, k], by which their answers are summed.

        Returns:
            as hidden_states.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        total = len(tokens)
        tokens, index, weights = self._split(tokens, top_k_index, top_k_weights)
        order = index.reshape(-1).argsort(stable=True)  # [T * k] places, sorted by expert
        answers = self._visit(tokens[order // index.shape[1]], index.reshape(-1)[order], self._run_routed)
        slots = torch.zeros_like(answers).index_copy(0, order, answers).view(*index.shape, -1)  # [T, k, hidden]
        summed = (slots * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
        joined = self._join(summed, total)
        return joined if hidden_states.dim() == 2 else joined.view(hidden_states.shape)

    def sorted(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """What experts make of rows sorted by expert.

        Args:
            inputs: [rows, inputs].
            expert_size: [experts], how many rows each gets.

        Returns:
            [rows, outputs].
        """
        sizes = torch.tensor(expert_size, device=inputs.device)
        index = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(sizes)
        rows, index = self._split(inputs, index)
        return self._join(self._visit(rows, index, self._run_sorted), len(inputs))

    def even(self, hidden_states: Tensor) -> Tensor:
        """What experts make of rows sorted by expert, as many for each.

        Args:
            hidden_states: [experts * T, hidden].

        Returns:
            as hidden_states.
        """
        experts = self.local * self.ep.size()
        index = torch.arange(experts, device=hidden_states.device)
        rows, index = self._split(hidden_states, index.repeat_interleave(len(hidden_states) // experts))
        return self._join(self._visit(rows, index, self._run_even), len(hidden_states))

    def _run_routed(self, rows: Tensor, index: Tensor) -> Tensor:
        return self.inner(rows, index.unsqueeze(-1), rows.new_ones(len(rows), 1))

    def _run_sorted(self, rows: Tensor, index: Tensor) -> Tensor:
        order = index.argsort(stable=True)
        answers = self.inner(rows[order], torch.bincount(index, minlength=self.local).tolist())
        return torch.zeros_like(answers).index_copy(0, order, answers)

    def _run_even(self, rows: Tensor, index: Tensor) -> Tensor:
        # Every rank has sent as many rows to each expert, the ranks of tp together.
        order = index.argsort(stable=True)
        answers = self.inner(rows[order])
        return torch.zeros_like(answers).index_copy(0, order, answers)

    def _visit(self, rows: Tensor, index: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send each row to its expert and get the answer back. All ranks of ep take part, with rows or without.

        Args:
            rows: [n, inputs], sorted by expert.
            index: int64 [n], the expert of each.
            run: (rows, their experts counted from this rank's first) to answers.

        Returns:
            [n, outputs], in the order of the rows.
        """
        group, ranks = self.ep.get_group(), self.ep.size()
        send = torch.bincount(index, minlength=self.local * ranks).view(ranks, self.local)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=group)
        # The one time that a layer waits for the device: an exchange needs its sizes on the host.
        sent, received = torch.stack([send.sum(1), receive.sum(1)]).tolist()
        visitors = _Rows.apply(rows, sent, received, group)
        local = torch.arange(self.local, device=rows.device).repeat(ranks).repeat_interleave(receive.reshape(-1))
        with _local_weights(self.module, self.shared):
            if len(visitors):
                answers = run(visitors, local)
            else:  # zeros, cut off again: all ranks must take part in the exchange of gradients, and have one to sum
                none = visitors.sum(0, keepdim=True).expand(self.local, -1)
                answers = run(none, torch.arange(self.local, device=rows.device))[:0]
        return _Rows.apply(answers, received, sent, group)

    def _split(self, *values: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of rows that all ranks of tp hold."""
        if self.tp is None:
            return values
        whole = [DTensor.from_local(value, self.tp, [Replicate()], run_check=False) for value in values]
        return tuple(value.redistribute(placements=[Shard(0)]).to_local() for value in whole)

    def _join(self, rows: Tensor, total: int) -> Tensor:
        """All rows again, from each tp rank's part."""
        if self.tp is None:
            return rows
        shape = torch.Size((total, *rows.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        part = DTensor.from_local(rows.contiguous(), self.tp, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return part.full_tensor()


class _Rows(torch.autograd.Function):
    """Rows to the ranks of a group, so many to each; the gradient travels back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


@contextmanager
def _local_weights(module: nn.Module, shared: frozenset[str]) -> Iterator[None]:
    """Let a module's code see this rank's part of each weight as a plain tensor; gradients go to the whole."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    for key, parameter in list(module.named_parameters()):
        if isinstance(parameter, DTensor):
            owner_name, _, name = key.rpartition(".")
            owner = module.get_submodule(owner_name)
            # What all experts use has on each rank the gradient of the tokens there: a part of a sum.
            part = parameter.to_local(grad_placements=[Partial()] if key in shared else None)
            swapped.append((owner, name, parameter))
            owner._parameters[name] = part  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, name, parameter in swapped:
            owner._parameters[name] = parameter
