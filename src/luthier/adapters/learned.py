"""Prompt tuning, prefix tuning and adaption prompts on a model: put in place, given first values, counted."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from luthier.adapters.learned_files import load_learned, read_learned
from luthier.adapters.prompt import (
    attach_adaption,
    attach_prefix,
    attach_tokens,
    key_heads,
    learned,
)
from luthier.adapters.rows import whole
from luthier.batch import Batch, Sample
from luthier.config.adapters import AdaptionPromptConfig, PrefixConfig, PromptConfig
from luthier.errors import ConfigError, ModelError, first_line
from luthier.hf.anatomy import describe
from luthier.hf.debug.small import kind_of, make_small
from luthier.hf.forward import hidden_states
from luthier.hf.kinds import sees
from luthier.hf.load import DTYPES
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.shards import fill

LearnedConfig = PromptConfig | PrefixConfig | AdaptionPromptConfig


@dataclass(frozen=True, slots=True)
class LearnedReport:
    """What learns in the place of text; `str()` is the line that a run prints.

    Attributes:
        what: in words.
        trainable: parameters that train.
        total: all parameters, tied ones once.
        ranks: none; adapters of other kinds have them.
    """

    what: str
    trainable: int
    total: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}; {self.trainable:,} trainable of {self.total:,}"


def apply_learned(model: Any, config: LearnedConfig, seed: int = 0) -> LearnedReport:
    """Put in place what the config names, and freeze everything else.

    Args:
        model: a Transformers model without adapters. On meta only the structure is made: call `finish_learned` when
            the weights are there.
        config: what is to learn. With `start_from` its sizes are those of the files.
        seed: of first values.

    Raises:
        ConfigError: the architecture does not admit it, or the config contradicts `start_from`.
        ModelError: the files cannot be used.
    """
    config = as_in_files(config)
    _require_used(model, config)
    _attach(model, config)
    if any(parameter.is_meta for parameter in model.parameters()):
        freeze_all_but_learned(model)
        return learned_report(model, config)
    return finish_learned(model, config, seed)


def finish_learned(model: Any, config: LearnedConfig, seed: int = 0) -> LearnedReport:
    """Give what was put in place its first values, or those of files, once the weights are there; on a layout all
    ranks call it."""
    if config.start_from is not None:
        load_learned(model, Path(config.start_from))
    else:
        initialise_learned(model, config, seed)
    freeze_all_but_learned(model)
    return learned_report(model, as_in_files(config))


def freeze_all_but_learned(model: nn.Module) -> None:
    """Let what stands in the place of text require gradients, and nothing else."""
    chosen = {id(parameter) for parameter in learned(model).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def as_in_files(config: LearnedConfig) -> LearnedConfig:
    """The config with the sizes of the files it starts from.

    Raises:
        ConfigError: it says something else.
        ModelError: the files are of another kind.
    """
    if config.start_from is None:
        return config
    files = read_learned(Path(config.start_from))
    if files.kind != config.kind:
        what = f"the files in {config.start_from} hold an adapter of kind {files.kind}"
        raise ConfigError(what, where="adapter.kind", remedy=f"take kind: {files.kind}")
    for name, theirs in files.sizes.items():
        own, usual = getattr(config, name), type(config).model_fields[name].default
        if own not in (usual, theirs):
            raise ConfigError(
                f"{own} is asked for, and the adapter in {config.start_from} has {theirs}",
                where=f"adapter.{name}",
                remedy="leave it out when starting from an adapter",
            )
    # files of a prefix hold what its network has made
    return config.model_copy(update={**files.sizes, **({"projection": False} if files.kind == "prefix" else {})})


def _attach(model: Any, config: LearnedConfig) -> None:
    if sees(model.config):
        what = f"{type(model).__name__} lays pictures out among its tokens, where nothing else can stand"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: lora")
    dtype = DTYPES.get(config.dtype or "")
    refused: dict[str, Any] = {"pp": f"adapters of kind {config.kind} are not dealt to stages"}
    match config:
        case PromptConfig():
            attach_tokens(model, config.num_virtual_tokens, dtype)
            refused["cp"] = "virtual tokens stand before a row's documents, not before each rank's part of them"
        case PrefixConfig():
            attach_prefix(
                model,
                config.num_virtual_tokens,
                dtype,
                (config.encoder_hidden_size or 0) if config.projection else None,
            )
            refused["cp"] = "a prefix stands before a row's documents, not before each rank's part of them"
            if config.projection:
                refused["tp"] = "the network that a prefix is trained through makes all heads at once"
            else:
                heads = key_heads(model)[0]
                refused["tp"] = _Even(heads)
        case AdaptionPromptConfig():
            attach_adaption(model, config.adapter_len, config.adapter_layers, dtype)
    model.refused_layouts = {**getattr(model, "refused_layouts", {}), **refused}


@dataclass(frozen=True, slots=True)
class _Even:
    """Why heads of a prefix cannot be dealt to so many ranks."""

    heads: int

    def __call__(self, degree: int) -> str | None:
        return f"{self.heads} heads of a prefix cannot be dealt evenly" if self.heads % degree else None


def _require_used(model: Any, config: LearnedConfig) -> None:
    """Try it on a small model of the kind: an attention that passes it by would train nothing and say nothing."""
    name = type(model).__name__
    if isinstance(config, AdaptionPromptConfig):
        return  # of two architectures, which are known
    try:
        small = make_small(kind_of(model))
        _attach(small, config.model_copy(update={"num_virtual_tokens": 3, "dtype": None}))
        parameters = learned(small)
        for parameter in parameters.values():
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
        rows = [Sample.from_ids([1, 2, 3, 4], [1.0] * 4), Sample.from_ids([2, 1, 0], [1.0] * 3)]
        with torch.enable_grad():
            hidden = hidden_states(small, Batch.pack(rows))
            found = torch.autograd.grad(hidden.float().square().sum(), list(parameters.values()), allow_unused=True)
    except ConfigError:
        raise
    except (ModelError, *RAISED_BY_MODELS) as error:
        what = f"{name} cannot run with an adapter of kind {config.kind} ({first_line(error)})"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: lora") from error
    if any(gradient is None for gradient in found):
        what = f"{name} takes no heed of an adapter of kind {config.kind}"
        raise ConfigError(what, where="adapter.kind", remedy="take kind: lora")


@torch.no_grad()
def initialise_learned(model: Any, config: LearnedConfig, seed: int) -> None:
    """First values, each drawn whole from a stream of its own by the seed and its name: the same on every layout.

    Virtual tokens are rows of the table, or normal; prefixes and prompts normal, as PEFT's; gates 0; matrices of a
    network uniform within 1/sqrt(inputs).
    """
    for name, parameter in learned(model).items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        first: Tensor
        if name.endswith(".gate"):
            first = torch.zeros(parameter.shape)
        elif isinstance(config, PromptConfig) and config.init == "vocabulary":
            table = model.get_input_embeddings().weight
            rows = whole(table)
            chosen = torch.randint(0, len(rows), (len(parameter),), generator=generator)
            first = rows[chosen.to(rows.device)]
        elif ".transform." in name:
            inputs = model.prompt_encoder.transform[int(name.split(".")[-2])].in_features
            bound = 1.0 / math.sqrt(inputs)
            first = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        else:
            first = torch.empty(parameter.shape).normal_(generator=generator)
        fill(parameter, first.to(parameter.device, parameter.dtype))


def learned_report(model: Any, config: LearnedConfig) -> LearnedReport:
    """Count what learns. On meta nothing is aliased yet, but a head that is to be the embedding counts once."""
    anatomy = describe(model)
    shared = f"{anatomy.head}.weight" if anatomy.tied else None
    counted = [parameter for name, parameter in model.named_parameters() if name != shared]
    match config:
        case PromptConfig():
            what = f"prompt tuning: {config.num_virtual_tokens} virtual tokens"
        case PrefixConfig():
            through = " through a network" if config.projection else ""
            what = f"prefix tuning: {config.num_virtual_tokens} positions in each layer{through}"
        case AdaptionPromptConfig():
            layers = sum(name.endswith(".gate") for name in learned(model))
            what = f"adaption prompts: {config.adapter_len} in each of {layers} layers"
    trainable = sum(parameter.numel() for parameter in learned(model).values())
    return LearnedReport(what, trainable, sum(parameter.numel() for parameter in counted))
