"""Numbers of one side beside those of the other: which elements a rank holds, how far they are off, which copies agree.

A rank holds parts of tensors. Which parts is asked of the same cut that gave it its weights, by cutting the numbers of
the elements; so each rank compares its own with the reference's, and nothing has to be gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from luthier.hf.gather import local_part
from luthier.hf.shards import own_part

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Difference:
    """How two sets of tensors differ.

    Attributes:
        worst: largest difference over largest entry, of the worst tensor.
        tensor: its name.
        equal: tensors whose bits are all the same.
        tensors: how many there are.
        missing: names that the reference has and no rank.
        extra: names that some rank has and the reference has not.
    """

    worst: float
    tensor: str
    equal: int
    tensors: int
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def compare(
    held: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    reference: Mapping[str, torch.Tensor],
    *,
    negligible: float,
    everywhere: bool,
) -> Difference:
    """Compare what all ranks hold with whole tensors.

    Args:
        held: name -> (the parameter, which tells the part, and the values of that part, a DTensor or plain).
        reference: name -> whole tensor; the same names in the same order on every rank.
        negligible: a tensor whose largest entry is below this share of the largest of all is zero in exact arithmetic,
            so that its difference is measured against that largest one instead of against itself.
        everywhere: whether there are other ranks, all of which call this.

    Returns:
        the same on every rank.
    """
    names = list(reference)
    sizes = torch.tensor([float(reference[name].abs().max()) if reference[name].numel() else 0.0 for name in names])
    biggest = float(sizes.max()) if names else 0.0
    found = torch.zeros(3, len(names), dtype=torch.float64)  # difference, differing bits, held by this rank
    for index, name in enumerate(names):
        if name not in held:
            continue
        parameter, value = held[name]
        expected = own_part(parameter, reference[name])
        mine = local_part(value).cpu()
        assert mine.shape == expected.shape, f"{name} is {tuple(mine.shape)} beside {tuple(expected.shape)}"
        found[2, index] = 1
        if mine.numel():
            difference = (mine.double() - expected.double()).abs().max()
            found[0, index] = torch.inf if torch.isnan(difference) else difference
            found[1, index] = float(not torch.equal(mine, expected.to(mine.dtype)))
    extra = sorted(set(held) - set(names))
    if everywhere:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        extra = sorted({name for names_of in _gathered(extra) for name in names_of})
    scale = torch.where(sizes > negligible * biggest, sizes, torch.full_like(sizes, biggest)).double()
    relative = torch.where(found[0] == 0, torch.zeros_like(scale), found[0] / scale)
    index = int(relative.argmax()) if names else 0
    return Difference(
        worst=float(relative[index]) if names else 0.0,
        tensor=names[index] if names else "",
        equal=int(((found[1] == 0) & (found[2] == 1)).sum()),
        tensors=len(names),
        missing=tuple(name for index, name in enumerate(names) if found[2, index] == 0),
        extra=tuple(extra),
    )


def copies_agree(parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of parameters of which two ranks hold the same part with other bits; all ranks call this."""
    told = {}
    for name, parameter in parameters.items():
        elements = torch.arange(parameter.numel()).reshape(parameter.shape)
        told[name] = (_digest(own_part(parameter, elements)), _digest(local_part(parameter).cpu()))
    parts: dict[tuple[str, str], set[str]] = {}
    for of_rank in _gathered(told):
        for name, (part, bits) in of_rank.items():
            parts.setdefault((name, part), set()).add(bits)
    return tuple(sorted({name for (name, _), bits in parts.items() if len(bits) > 1}))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def _gathered(value: _T) -> list[_T]:
    everyone: list[_T] = [value] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
