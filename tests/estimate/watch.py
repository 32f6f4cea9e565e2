"""What really happens in a step on a rank: bytes that tensors take, and bytes that go to other ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from luthier.hf.nf4 import Nf4Weight


class Watch(TorchDispatchMode):
    """Follows every tensor's memory, and every collective.

    Attributes:
        peak: most bytes that were there at once.
        sent: (operation, ranks of its group) -> bytes that this rank sends: what of the data is for other ranks, twice
            the share (n - 1) / n for sums.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self.sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._live: dict[int, Any] = {}
        for tensor in tensors:
            self._see(tensor)
        self._measure()

    def _see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, Nf4Weight):
            self._see(tensor.codes)
            return self._see(tensor.scales)
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None or known() is not storage:
            self._live[storage._cdata] = weakref.ref(storage)

    def _measure(self) -> None:
        total = 0
        for key, reference in list(self._live.items()):
            storage = reference()
            if storage is None:
                del self._live[key]
            else:
                total += storage.nbytes()
        self.peak = max(self.peak, total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        self._measure()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func._schema.name.partition("::")[2], args, kwargs or {})
        return result

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        if name in ("recv_", "wait_tensor", "barrier", "_wrap_tensor_autograd"):
            return
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ranks = tuple(dist.get_process_group_ranks(_group(leaves)))
        others = len(ranks) - 1
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        match name:
            case "allreduce_" | "all_reduce" | "all_reduce_":
                kind, count = "all_reduce", 2 * sizes[0] * others // len(ranks)
            case "_allgather_base_" | "all_gather_into_tensor" | "allgather_":
                kind, count = "all_gather", min(sizes) * others
            case "_reduce_scatter_base_":
                kind, count = "reduce_scatter", min(sizes) * others
            case "reduce_scatter_tensor":
                kind, count = "reduce_scatter", sizes[0] * others // len(ranks)
            case "alltoall_base_" | "all_to_all_single":
                kind, given = "all_to_all", tensors[-1]
                splits = args[-2] if name == "all_to_all_single" else args[4]
                whole = len(given)
                own = splits[ranks.index(dist.get_rank())] if splits else whole // len(ranks)
                count = sizes[-1] * (whole - own) // max(1, whole)
            case "send":
                kind, count = "send", sizes[0]
            case "broadcast_":
                kind, count = "broadcast", sizes[0]
            case _:
                raise AssertionError(f"{name} is not known here")
        self.sent[kind, ranks] += count


def _group(leaves: list[Any]) -> dist.ProcessGroup:
    for leaf in leaves:
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
        if isinstance(leaf, str):
            try:
                return _resolve_process_group(leaf)
            except Exception:
                continue
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf)
            except RuntimeError:
                continue
    raise AssertionError(f"no group among {[type(leaf) for leaf in leaves]}")
