"""Context parallelism: ranks that each hold a part of every packed row.

Embeddings, norms, MLPs and the head see single positions, so each rank runs them on its own. Attention alone looks
further, and there the ranks exchange what they need (`hf/rows/shared_row.py`). A row is cut into 2 x degree pieces, and
a rank holds one from the head and its mirror image from the tail: under a causal mask that is the same work for all.

Source of the balanced cut: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2,
https://arxiv.org/abs/2407.21783.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from luthier.batch import Batch
from luthier.hf.anatomy import stateful_part
from luthier.parallel.sharing import manner_of, share


def cut(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This rank's part of a packed row. No communication.

    Args:
        batch: T positions, the same on all ranks of the mesh.
        mesh: the ranks that share the row, one-dimensional.

    Returns:
        [1, T' / degree] of each tensor, where T' is T padded to a multiple of 2 x degree with weight 0; `cu_seqlens`
        and `origins` are those of the whole padded row.
    """
    padded = _padded(batch, 2 * mesh.size())
    here = held_positions(padded.tokens, mesh.size(), mesh.get_local_rank()).to(batch.input_ids.device)
    return replace(
        padded,
        input_ids=padded.input_ids[:, here],
        position_ids=padded.position_ids[:, here],
        targets=padded.targets[:, here],
        weights=padded.weights[:, here],
    )


def _padded(batch: Batch, multiple: int) -> Batch:
    """Padded by a document; a row of a single one grows by its last position, since not every model can have two."""
    missing = -batch.tokens % multiple
    if batch.documents > 1 or not missing:
        return batch.padded(multiple)
    longer = batch.padded(multiple)
    positions = longer.position_ids.clone()
    positions[:, batch.tokens :] = batch.tokens - 1  # which the model has, whatever its limit is
    return replace(longer, position_ids=positions, cu_seqlens=longer.cu_seqlens[[0, 2]], origins=batch.origins)


def join(values: torch.Tensor, mesh: DeviceMesh, tokens: int) -> torch.Tensor:
    """Numbers of the whole row from those of its parts. All ranks of the mesh call it.

    Differentiable in this rank's own values alone: where all ranks make the same loss of the joined numbers, each
    sends back the gradient of its part, and the gradients of the ranks add up to the whole.

    Args:
        values: [T' / degree, ...], of the positions that `cut` gave to this rank.
        mesh: the ranks that share the row.
        tokens: T, the length of the row before it was padded.

    Returns:
        [T, ...] in the row's order, without the padding.
    """
    joined: torch.Tensor = _Join.apply(values, mesh, tokens)
    return joined


def total(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum of a number over the ranks that share the row, differentiable in this rank's part alone, as `join` is.

    Args:
        value: any shape.
        mesh: the ranks that share the row, all of which call this.
    """
    result: torch.Tensor = _Total.apply(value, mesh)
    return result


def held_positions(tokens: int, degree: int, rank: int) -> torch.Tensor:
    """int64 [tokens / degree]: which positions of a row a rank holds.

    >>> held_positions(8, 2, 0), held_positions(8, 2, 1)
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """
    pieces = torch.arange(tokens).view(2 * degree, -1)
    return torch.cat([pieces[rank], pieces[2 * degree - 1 - rank]])


def refusal(model: Any, degree: int) -> str | None:
    """Why an architecture cannot run on parts of rows, as a clause; None if it can.

    Args:
        model: a Transformers model, perhaps on meta.
        degree: number of ranks that share a row.
    """
    if degree == 1:
        return None
    name = type(model).__name__
    stateful = stateful_part(model)
    if stateful is not None:
        return f"{name} has {stateful}, through which each position sees those before it in order, on other ranks too"
    manner, why = manner_of(model)
    return why if manner is None else None


def prepare(model: Any, mesh: DeviceMesh) -> None:
    """Make a model run on parts of rows: wherever `documents` of a row of T positions are active and its backbone is
    given T / degree of them, attention brings the row together. Given whole rows, it runs as before.

    Args:
        model: a Transformers model, on meta or loaded.
        mesh: the ranks that share each row, one-dimensional.
    """
    manner, why = manner_of(model)
    assert manner is not None, why
    share(model, Trade(mesh), manner)


class Trade:
    """The `hf.rows.documents.Exchange` of a group of ranks: one all-to-all each way.

    Args:
        mesh: the ranks, one-dimensional.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.degree, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group()

    def positions(self, tokens: int) -> torch.Tensor:
        return held_positions(tokens, self.degree, self.rank)

    def to_heads(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        if len({tensor.dtype for tensor in tensors}) == 1:
            result: tuple[torch.Tensor, ...] = _ToHeads.apply(self, wanted, *tensors)
            return result
        pairs = zip(tensors, wanted, strict=True)
        return tuple(_ToHeads.apply(self, [asked], tensor)[0] for tensor, asked in pairs)

    def to_positions(self, output: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _ToPositions.apply(self, output)
        return result

    def swap(self, parts: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """Send flat parts[r] to rank r; what rank r sent, of received[r] numbers."""
        sent = torch.cat(list(parts))
        result = sent.new_empty(sum(received))
        dist.all_to_all_single(result, sent, list(received), [part.numel() for part in parts], group=self.group)
        return list(result.split(list(received)))

    def rows_of(self, rank: int, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The positions of `whole` that a rank holds, in its order; a copy."""
        size = whole.shape[dim] // (2 * self.degree)
        halves = [whole.narrow(dim, piece * size, size) for piece in (rank, 2 * self.degree - 1 - rank)]
        return torch.cat(halves, dim)

    def put_rows(self, rank: int, whole: torch.Tensor, part: torch.Tensor, dim: int) -> None:
        """Write a rank's positions into `whole`; the inverse of `rows_of`."""
        size = whole.shape[dim] // (2 * self.degree)
        for piece, half in zip((rank, 2 * self.degree - 1 - rank), part.split(size, dim), strict=True):
            whole.narrow(dim, piece * size, size).copy_(half)


class _ToHeads(torch.autograd.Function):
    """[1, heads, T / degree, dim] each to [1, heads wanted here, T, dim] each."""

    @staticmethod
    def forward(ctx: Any, trade: Trade, wanted: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trade, ctx.wanted, ctx.shapes = trade, wanted, [tensor.shape for tensor in tensors]
        pairs = list(zip(tensors, wanted, strict=True))
        ranks = range(trade.degree)
        parts = [torch.cat([_heads(tensor[0], asked[rank]).flatten() for tensor, asked in pairs]) for rank in ranks]
        sizes = [len(asked[trade.rank]) * tensor[0, 0].numel() for tensor, asked in pairs]
        received = trade.swap(parts, [sum(sizes)] * trade.degree)
        whole = []
        for tensor, asked in pairs:
            _, _, length, dim = tensor.shape
            whole.append(tensor.new_empty(1, len(asked[trade.rank]), length * trade.degree, dim))
        for rank, flat in enumerate(received):
            for target, part in zip(whole, flat.split(sizes), strict=True):
                _, heads, tokens, dim = target.shape
                trade.put_rows(rank, target[0], part.view(heads, tokens // trade.degree, dim), 1)
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        trade, wanted = ctx.trade, ctx.wanted
        ranks = range(trade.degree)
        parts = [torch.cat([trade.rows_of(rank, grad[0], 1).flatten() for grad in gradients]) for rank in ranks]
        sizes = [
            [len(asked[rank]) * shape[2] * shape[3] for shape, asked in zip(ctx.shapes, wanted, strict=True)]
            for rank in ranks
        ]
        received = [
            flat.split(size) for flat, size in zip(trade.swap(parts, [sum(s) for s in sizes]), sizes, strict=True)
        ]
        results = []
        for index, (shape, asked) in enumerate(zip(ctx.shapes, wanted, strict=True)):
            flat = received[0][index]
            # Several ranks may have read one head; what they send back is summed in more digits than bf16 has.
            shared = sum(len(heads) for heads in asked) > shape[1]
            wide = torch.float32 if shared and flat.element_size() < 4 else flat.dtype
            total = flat.new_zeros(shape, dtype=wide)
            for rank in ranks:
                heads = asked[rank]
                part = received[rank][index].view(len(heads), shape[2], shape[3])
                _heads(total[0], heads).add_(part)
            results.append(total.to(flat.dtype))
        return None, None, *results


class _ToPositions(torch.autograd.Function):
    """[1, T, heads / degree, dim] to [1, T / degree, heads, dim]."""

    @staticmethod
    def forward(ctx: Any, trade: Trade, output: torch.Tensor) -> torch.Tensor:
        ctx.trade = trade
        _, tokens, heads, dim = output.shape
        parts = [trade.rows_of(rank, output[0], 0).flatten() for rank in range(trade.degree)]
        received = trade.swap(parts, [part.numel() for part in parts])
        shape = (tokens // trade.degree, heads, dim)
        return torch.cat([flat.view(shape) for flat in received], 1)[None]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        trade = ctx.trade
        _, length, heads, dim = gradient.shape
        share = heads // trade.degree
        parts = [part.flatten() for part in gradient[0].split(share, 1)]
        whole = gradient.new_empty(1, length * trade.degree, share, dim)
        for rank, flat in enumerate(trade.swap(parts, [part.numel() for part in parts])):
            trade.put_rows(rank, whole[0], flat.view(length, share, dim), 0)
        return None, whole


class _Join(torch.autograd.Function):
    """[T / degree, ...] of each rank to [T, ...] in the row's order; the gradient is that of this rank's own part."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mesh: DeviceMesh, tokens: int) -> torch.Tensor:
        degree = mesh.size()
        parts = [torch.empty_like(values) for _ in range(degree)]
        dist.all_gather(parts, values.contiguous(), group=mesh.get_group())
        joined = values.new_empty(len(values) * degree, *values.shape[1:])
        for rank, part in enumerate(parts):
            joined[held_positions(len(joined), degree, rank).to(values.device)] = part
        ctx.here = held_positions(len(joined), degree, mesh.get_local_rank()).to(values.device)
        return joined[:tokens].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        own = gradient[ctx.here.clamp(max=len(gradient) - 1)]
        there = (ctx.here < len(gradient)).view(-1, *[1] * (gradient.dim() - 1))
        return own.where(there, 0), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        summed = value.clone()
        dist.all_reduce(summed, group=mesh.get_group())
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


def _heads(tensor: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """Neighbouring heads of [heads, length, dim]; a view."""
    return tensor[heads[0] : heads[-1] + 1]
