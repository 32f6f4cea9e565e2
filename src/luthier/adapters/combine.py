"""Several LoRA adapters made one, weighted: as PEFT's `add_weighted_adapter` does it, from files to files.

`cat` is exact: the product of the new matrices is the weighted sum of the adapters' products, at the sum of their
ranks; `svd` is the nearest to that sum at a lower rank. The others combine A's with A's and B's with B's, each scaled
by the root of weight x scale, which is quick and far from the sum:

- `linear`: the sum of both
- `magnitude_prune`: the same of the largest entries of each matrix
- `ties`: of the largest entries those of the sign that has the larger sum, and of these the mean (Yadav et al. 2023,
  https://arxiv.org/abs/2306.01708)
- `dare_linear`, `dare_ties`: entries are kept at random and scaled up by what was dropped (Yu et al. 2023,
  https://arxiv.org/abs/2311.03099), then as `linear`, or as `ties`

The first matrix carries a weight's sign, so that a negative one takes away.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from luthier.adapters.aside import aside_of, rename
from luthier.adapters.peft_config import (
    CONFIG_FILE,
    WEIGHT_FILES,
    PeftConfig,
    find_config,
    read_peft_config,
    read_tensors,
)
from luthier.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

Method = Literal["cat", "svd", "linear", "magnitude_prune", "ties", "dare_linear", "dare_ties"]
Sign = Literal["total", "frequency"]
SIDES = (".lora_A.weight", ".lora_B.weight")
_PRUNES = ("magnitude_prune", "ties", "dare_linear", "dare_ties")
_SUMS = ("cat", "svd")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the adapters.

    Attributes:
        directory: of PEFT files.
        weight: how much of it; below 0 takes it away.
    """

    directory: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class _Adapter:
    part: Part
    config: PeftConfig
    raw: dict[str, Any]
    tensors: dict[str, Tensor]

    def scale(self, key: str) -> float:
        """Of a layer, by its key in the file without the side: alpha / rank, or alpha / sqrt(rank)."""
        rank = len(self.tensors[f"{key}{SIDES[0]}"])
        alpha = self.config.alpha_of(key.removeprefix("base_model.model."))
        return alpha / (math.sqrt(rank) if self.config.rslora else rank)


@dataclass(frozen=True, slots=True)
class Combined:
    """What was made.

    Attributes:
        layers: how many carry the new adapter.
        rank: its rank.
        method: how.
        directory: where it lies.
    """

    layers: int
    rank: int
    method: str
    directory: Path


def combine(
    parts: Sequence[Part],
    directory: Path,
    *,
    method: Method = "cat",
    density: float | None = None,
    sign: Sign = "total",
    rank: int | None = None,
    seed: int = 0,
) -> Combined:
    """Write one adapter made of several.

    Args:
        parts: the adapters, of one base.
        directory: made if it is not there.
        method: see above.
        density: share of entries that is kept, of methods that drop some.
        sign: what decides the sign of an entry of `ties`: the sum, or how many adapters have it.
        rank: of `svd`; the largest of the adapters' when left out.
        seed: of what is kept at random, drawn for each matrix by its name.

    Raises:
        ConfigError: the adapters, or the arguments, cannot be combined so.
        ModelError: files cannot be read.
    """
    _require_sense(parts, method, density, rank)
    adapters = [_read(part) for part in parts]
    _require_one_base(adapters)
    keys = list(dict.fromkeys(key.removesuffix(SIDES[0]) for one in adapters for key in one.tensors if SIDES[0] in key))
    size = {"cat": sum(map(_rank, adapters)), "svd": rank or max(map(_rank, adapters))}.get(method, _rank(adapters[0]))
    made: dict[str, Tensor] = {}
    for key in keys:
        present = [one for one in adapters if f"{key}{SIDES[0]}" in one.tensors]
        _require_alike(key, present, equal_ranks=method not in _SUMS)
        if method in _SUMS:
            pair = _concatenated(key, present, size) if method == "cat" else _nearest(key, present, size)
        else:
            pair = _entrywise(key, present, method, density, sign, seed)
        made |= {f"{key}{side}": matrix.contiguous() for side, matrix in zip(SIDES, pair, strict=True)}
    ranks = {key: len(made[f"{key}{SIDES[0]}"]) for key in keys}
    _write(directory, adapters, made, size, {key: own for key, own in ranks.items() if own != size})
    return Combined(len(keys), size, method, directory)


def _require_sense(parts: Sequence[Part], method: Method, density: float | None, rank: int | None) -> None:
    if method not in get_args(Method):
        raise ConfigError(f"{method!r} is no method", where="--method", remedy=f"take {', '.join(get_args(Method))}")
    if not parts:
        raise ConfigError("no adapter is named", where="DIR=WEIGHT", remedy="name one or more")
    if method in _PRUNES and density is None:
        raise ConfigError(f"{method} needs the share of entries that is kept", where="--density", remedy="try 0.5")
    if method not in _PRUNES and density is not None:
        raise ConfigError(f"{method} keeps all entries", where="--density", remedy="leave it out")
    if density is not None and not 0.0 < density <= 1.0:
        raise ConfigError(f"{density:g} is not above 0 and at most 1", where="--density")
    if rank is not None and (method != "svd" or rank < 1):
        raise ConfigError("only svd can be given a rank, of 1 or more", where="--rank", remedy="leave it out")


def _read(part: Part) -> _Adapter:
    config = read_peft_config(part.directory)
    where = str(config.directory)
    tensors = read_tensors(config.directory)
    odd = next((key for key in sorted(tensors) if not key.endswith(SIDES)), None)
    if odd is not None or config.parameters:
        what = f"it holds more than low-rank matrices of layers ({odd or 'target_parameters'})"
        raise ConfigError(what, where=where, remedy="merge it into its base first")
    if config.dora:
        raise ConfigError("it holds directions with lengths of their own (DoRA), which do not add up", where=where)
    for key in tensors:
        side, other = SIDES if key.endswith(SIDES[0]) else SIDES[::-1]
        if f"{key.removesuffix(side)}{other}" not in tensors:
            raise ModelError(f"of {key.removesuffix(side)} only one side is there", where=where)
    raw = json.loads(find_config(part.directory).read_text(encoding="utf-8"))
    wide = {key: value if value.dtype == torch.float64 else value.float() for key, value in tensors.items()}
    return _Adapter(part, config, raw, wide)


def _require_one_base(adapters: Sequence[_Adapter]) -> None:
    """A base may be named by two addresses; of two that share no layer it is another one."""
    first = adapters[0]
    for other in adapters[1:]:
        names = [str(one.raw.get("base_model_name_or_path") or "") for one in (first, other)]
        if not all(names) or names[0] == names[1]:
            continue
        if not first.tensors.keys() & other.tensors.keys():
            what = f"its base is {names[1]}, that of {first.part.directory} is {names[0]}, and they share no layer"
            raise ConfigError(what, where=str(other.part.directory), remedy="combine adapters of one base")
        logger.warning(
            "%s names the base %s, %s names %s: they are taken to be the same",
            *(first.part.directory, names[0], other.part.directory, names[1]),
        )


def _rank(adapter: _Adapter) -> int:
    """The largest of its layers', which is what PEFT makes room for."""
    return max(len(value) for key, value in adapter.tensors.items() if key.endswith(SIDES[0]))


def _require_alike(key: str, present: Sequence[_Adapter], *, equal_ranks: bool) -> None:
    first = present[0]
    for other in present[1:]:
        down, up = ((one.tensors[f"{key}{SIDES[0]}"], one.tensors[f"{key}{SIDES[1]}"]) for one in (first, other))
        if down[0].shape[1] != up[0].shape[1] or down[1].shape[0] != up[1].shape[0]:
            what = f"{key} has other sizes than in {first.part.directory}"
            raise ConfigError(what, where=str(other.part.directory), remedy="combine adapters of one base")
        if equal_ranks and len(down[0]) != len(up[0]):
            what = f"its rank at {key} is {len(up[0])}, and in {first.part.directory} it is {len(down[0])}"
            raise ConfigError(what, where=str(other.part.directory), remedy="take --method cat or svd")


def _concatenated(key: str, present: Sequence[_Adapter], size: int) -> tuple[Tensor, Tensor]:
    """[size, inputs] and [outputs, size]; filled up with 0 where an adapter lacks the layer."""
    down = torch.cat([one.tensors[f"{key}{SIDES[0]}"] * one.part.weight * one.scale(key) for one in present])
    up = torch.cat([one.tensors[f"{key}{SIDES[1]}"] for one in present], 1)
    missing = size - len(down)
    return torch.nn.functional.pad(down, (0, 0, 0, missing)), torch.nn.functional.pad(up, (0, missing))


def _nearest(key: str, present: Sequence[_Adapter], size: int) -> tuple[Tensor, Tensor]:
    """The best of this rank, or of the layer's own smaller side."""
    total = sum(
        (one.tensors[f"{key}{SIDES[1]}"] @ one.tensors[f"{key}{SIDES[0]}"] * one.scale(key) * one.part.weight)
        for one in present
    )
    assert isinstance(total, Tensor)
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    return right[:size], left[:, :size] * values[:size]


def _entrywise(
    key: str, present: Sequence[_Adapter], method: Method, density: float | None, sign: Sign, seed: int
) -> tuple[Tensor, Tensor]:
    """The sum, or what is elected, of A's and of B's."""
    amounts = [one.part.weight * one.scale(key) for one in present]
    made = []
    for side in SIDES:
        # a minus on one side only: two would cancel
        factors = [math.sqrt(abs(a)) * (-1 if side == SIDES[0] and a < 0 else 1) for a in amounts]
        matrices = [one.tensors[f"{key}{side}"] for one in present]
        if method.startswith("dare"):
            assert density is not None
            matrices = [
                matrix * kept(f"{key}{side}", number, matrix, density, seed) / density
                for number, matrix in enumerate(matrices)
            ]
        elif density is not None:
            matrices = [largest(matrix, density) for matrix in matrices]
        stacked = torch.stack(matrices)
        weighted = stacked * torch.tensor(factors, dtype=stacked.dtype)[:, None, None]
        made.append(elected(stacked, weighted, sign) if method.endswith("ties") else weighted.sum(0))
    return made[0], made[1]


def kept(name: str, number: int, matrix: Tensor, density: float, seed: int) -> Tensor:
    """1 where an entry is kept, else 0; drawn by the seed, the matrix's key and which adapter it is of."""
    digest = hashlib.sha256(f"{seed}:{name}:{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.bernoulli(torch.full(matrix.shape, density, dtype=matrix.dtype), generator=generator)


def largest(matrix: Tensor, density: float) -> Tensor:
    """A matrix whose share of largest entries is left, the others 0."""
    if density >= 1.0:
        return matrix
    chosen = matrix.abs().flatten().topk(int(density * matrix.numel())).indices
    mask = torch.zeros_like(matrix).flatten().index_fill_(0, chosen, 1)
    return matrix * mask.view_as(matrix)


def elected(stacked: Tensor, weighted: Tensor, sign: Sign) -> Tensor:
    """Mean of the weighted entries whose sign is the majority's.

    Args:
        stacked: [adapters, ...], before they were weighted; they vote.
        weighted: the same times their weights.
        sign: by their sum, or by their number.
    """
    signs = stacked.sign()
    votes = (stacked if sign == "total" else signs).sum(0)
    mask = signs == torch.where(votes >= 0, 1, -1)
    return (weighted * mask).sum(0) / mask.sum(0).clamp(min=1.0)


def _write(
    directory: Path, adapters: Sequence[_Adapter], made: dict[str, Tensor], rank: int, others: dict[str, int]
) -> None:
    first = adapters[0].raw
    names = [key.removesuffix(SIDES[0]).removeprefix("base_model.model.") for key in made if key.endswith(SIDES[0])]
    listed = [one.raw.get("target_modules") for one in adapters]
    plain = not any(one.raw.get(key) for one in adapters for key in ("layers_to_transform", "exclude_modules"))
    endings = sorted({name for targets in listed if isinstance(targets, list) for name in targets})
    short = plain and all(isinstance(targets, list) for targets in listed)
    patterns = {name.removeprefix("base_model.model."): own for name, own in others.items()}
    content = {
        **first,
        "r": rank,
        "lora_alpha": rank,  # the scale is 1: weights and scales are in the matrices
        "use_rslora": False,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "target_modules": endings if short else sorted(names),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (CONFIG_FILE, WEIGHT_FILES[1]):
        (directory / stale).unlink(missing_ok=True)
    weights, config = directory / WEIGHT_FILES[0], directory / CONFIG_FILE
    save_file(made, aside_of(weights))
    rename(aside_of(weights), weights)
    aside_of(config).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    rename(aside_of(config), config)
