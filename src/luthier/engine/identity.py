"""What a checkpoint was taken of, in a few words that can be compared: a run must not go on with another model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from luthier.adapters import is_adapter_weight
from luthier.hf.gather import blocks, coordinate_of, local_part, reshard
from luthier.hf.together import Group, exchange, tell

_SAMPLED = 64


_NAMES = ("_name_or_path", "architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version")
"""Keys of a config that do not change what the weights compute; ties are seen in the weights."""


def config_digest(model: Any) -> str:
    """Hash of what a model's config says of its arithmetic: rotary frequencies, windows, caps; 16 hex digits."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in _NAMES}
        return value

    text = json.dumps(plain(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def model_digest(model: Any, group: Group | None = None) -> str:
    """Hash of a model's frozen and initial weights: every name, shape and dtype, and some values of each tensor.

    Evenly spaced values are read instead of all, so that a large model costs no second pass over its memory; two
    models that differ in nothing but a few unsampled numbers are taken for one. The hash does not depend on the layout.

    Args:
        model: adapters in place or not; adapter weights are left out. Whole, or what this rank holds of it.
        group: all ranks that hold parts of it, all of which call this; None where this process holds it whole.

    Returns:
        16 hex digits.
    """
    reshard(model)
    base = [(name, p) for name, p in model.named_parameters() if ".lora_" not in name and not is_adapter_weight(name)]
    own = {name: _samples(p) for name, p in base}
    shapes: dict[str, str] = {}
    values: dict[str, dict[int, float]] = {}
    for found in exchange(own, group):
        for name, (shape, samples) in found.items():
            shapes[name] = shape
            values.setdefault(name, {}).update(samples)
    digest = hashlib.sha256()
    for name in sorted(shapes):
        digest.update(f"{name} {shapes[name]}".encode())
        ordered = [value for _, value in sorted(values[name].items())]
        digest.update(torch.tensor(ordered, dtype=torch.float64).numpy().tobytes())
    return str(tell(digest.hexdigest()[:16], group))


def _samples(parameter: torch.Tensor) -> tuple[str, dict[int, float]]:
    """Shape and dtype, and of the sampled values, numbered, those that lie here; each on one of its ranks alone."""
    said = f"{tuple(parameter.shape)} {parameter.dtype}"
    count = parameter.numel()
    taken = torch.arange(0, count, max(1, count // _SAMPLED))[:_SAMPLED]
    local = local_part(parameter)
    if not isinstance(parameter, DTensor):
        return said, dict(enumerate(local.reshape(-1)[taken.to(local.device)].to("cpu", torch.float64).tolist()))
    coordinate = coordinate_of(parameter, dist.get_rank())
    assert coordinate is not None
    copies = [at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()]
    found: dict[int, float] = {}
    if any(copies):
        return said, found  # another rank, which holds the same, tells
    at = torch.stack(torch.unravel_index(taken, parameter.shape))  # [dimensions, samples]
    for here, whole in blocks(parameter, coordinate):
        start = torch.tensor([part.start for part in whole])[:, None]
        stop = torch.tensor([part.stop for part in whole])[:, None]
        inside = ((at >= start) & (at < stop)).all(0).nonzero().squeeze(-1)
        if len(inside):
            index = at[:, inside] - start + torch.tensor([part.start for part in here])[:, None]
            values = local[tuple(index.to(local.device))].to("cpu", torch.float64).tolist()
            found |= dict(zip(inside.tolist(), values, strict=True))
    return said, found
