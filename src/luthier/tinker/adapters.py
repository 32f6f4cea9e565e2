"""Adapters on a model that is there already, chosen by what its layers do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from luthier import adapters
from luthier.adapters import Adapted, LoraReport, LoraSpec, MergeReport
from luthier.config import LoraConfig as Config
from luthier.errors import ConfigError
from luthier.hf.fused import fused_projections
from luthier.hf.gather import gather, reshard
from luthier.hf.linear import linear_shape
from luthier.hf.together import exchange
from luthier.tinker.types import LoraConfig

logger = logging.getLogger(__name__)

_REPORT, _MERGED = "luthier_lora", "luthier_merged"


def apply_lora(model: Any, config: LoraConfig | None = None) -> LoraReport:
    """Put adapters beside a model's linear layers and freeze everything else.

    Attention and feed-forward layers, experts included, and the head are adapted as the config's gates say. One
    matrix that makes queries, keys and values gets an adapter for each of the three. A head that shares the
    embedding's weight is adapted alone: the embedding stays as it is.

    Args:
        model: any causal language model of Transformers, without adapters.
        config: rank and gates; Tinker's defaults when left out.

    Returns:
        what was adapted; as text the line that says so.

    Raises:
        ConfigError: a gate is open and adapts nothing, all are shut, or there are adapters already.
    """
    config = config or LoraConfig()
    if next(adapters.adapted(model), None) is not None:
        raise ConfigError("the model carries adapters already", where="model", remedy="merge them, or load it again")
    roles = roles_of(config)
    chosen: set[str] = set()
    for role in roles:
        found = adapters.resolve_targets(model, [role], where=f"train_{role}")
        linear = [name for name in found if _is_linear(model, name)]
        useless = adapters.passed_by(model, linear)
        if useless:
            logger.info("no adapter beside %s, whose weight is read without a call of the layer", ", ".join(useless))
        chosen |= set(found) - set(useless)
        if not set(found) - set(useless):
            what = f"no layer of this role is called in {type(model).__name__}"
            raise ConfigError(what, where=f"train_{role}", remedy="set it to false")
    fused = {name: parts for name, parts in fused_projections(model).items() if name in chosen}
    specs = {
        name: LoraSpec(config.rank * times, config.alpha * times)
        for name in adapters.resolve_targets(model, roles)
        if name in chosen
        for times in (3 if name in fused else 1,)
    }
    adapters.attach_all(model, specs, ())
    for name, parts in fused.items():
        adapters.split_outputs(model.get_submodule(name), parts.to(model.device))
    adapters.initialise_adapters(model, config.seed or 0)
    adapters.freeze(model)
    adapters.find_siblings(model)
    told = adapters.report(model, Config(rank=config.rank, alpha=config.alpha, target=roles))
    vars(model)[_REPORT] = told
    vars(model).pop(_MERGED, None)
    return told


def roles_of(config: LoraConfig) -> list[str]:
    """Which roles the config's gates let be adapted.

    Raises:
        ConfigError: none.
    """
    roles = [role for role in ("attn", "mlp", "unembed") if getattr(config, f"train_{role}")]
    if not roles:
        raise ConfigError(
            "nothing is to be adapted", where="lora_config", remedy="let train_attn be true, or train_mlp"
        )
    return roles


def iter_lora_modules(model: Any) -> Iterator[tuple[str, Adapted]]:
    """Full name and module of everything that is adapted: `lora_A.weight` [rank, inputs], `lora_B.weight`
    [outputs, rank] and `lora_spec`. Of one matrix for queries, keys and values the rank is three times the config's:
    the first third of A is the queries'."""
    yield from adapters.adapted(model)


def adapter_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all adapters' matrices by full name, on the CPU; what `model.load_state_dict(..., strict=False)`
    takes.

    Args:
        model: with adapters; or a client, or its state. On a layout it must be one of these two: all ranks call this
            and all get the matrices whole, of every stage.
    """
    state = getattr(model, "state", model)
    mesh, own = getattr(state, "mesh", None), getattr(state, "model", state)
    if mesh is None:
        weights = (item for item in own.state_dict().items() if adapters.is_adapter_weight(item[0]))
        return {name: value.detach().to("cpu", copy=True) for name, value in weights}
    reshard(own)
    parts = {name: p for name, p in own.named_parameters() if adapters.is_adapter_weight(name)}
    group, takers = dist.group.WORLD, dict[str, int]()
    for rank, names in enumerate(exchange(list(parts), group)):
        for name in names:
            takers.setdefault(name, rank)
    found: dict[str, torch.Tensor] = {}
    for name, rank in takers.items():
        if name in parts and (whole := gather(parts[name], rank)) is not None:
            found[name] = whole.to("cpu", copy=True)
    return {name: value for other in exchange(found, group) for name, value in other.items()}


def merge_adapters(model: Any) -> MergeReport:
    """Fold every adapter into its base weight; afterwards no training step is taken, and the model is a plain one.

    Raises:
        ConfigError: there is no adapter.
    """
    if next(adapters.adapted(model), None) is None:
        raise ConfigError("the model carries no adapters", where="model", remedy="apply_lora puts them there")
    told = adapters.merge(model)
    vars(model)[_MERGED] = True
    return told


def is_merged(model: Any) -> bool:
    """Whether the model's adapters were folded in."""
    return bool(vars(model).get(_MERGED))


def report_of(model: Any) -> LoraReport | None:
    """What `apply_lora` said of a model; None of one that trains whole."""
    report: LoraReport | None = vars(model).get(_REPORT)
    return report if next(adapters.adapted(model), None) is not None else None


def _is_linear(model: Any, name: str) -> bool:
    """Whether a target is a linear layer, and not a weight of experts."""
    parent, _, key = name.rpartition(".")
    return linear_shape(getattr(model.get_submodule(parent), key)) is not None
