"""Which parameters of an adapted model train, and what becomes of tied weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from luthier.adapters.embedding import LoraEmbedding, attach_embedding, detach_embedding
from luthier.adapters.experts import ExpertsAdapter, LoraExperts, adapted, attach_experts, detach_experts
from luthier.adapters.layer import LoraLayer, LoraSpec, attach, detach, is_adapter_weight
from luthier.adapters.prompt import detach_learned
from luthier.adapters.rows import detach_rows, rows_of
from luthier.errors import ConfigError
from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.experts import find_experts
from luthier.hf.gather import local_part


def attach_all(
    model: nn.Module, specs: Mapping[str, LoraSpec], trained: Sequence[str], dtype: torch.dtype | None = None
) -> None:
    """Put adapters in place and note what is trained whole.

    Args:
        model: a Transformers model without adapters, on meta or real.
        specs: full name of a linear layer, or of a matrix of experts -> how it is adapted.
        trained: full names of the modules that are trained whole.
        dtype: of the adapters; each base weight's when left out.
    """
    experts = {f"{group.name}.{key}": group for group in find_experts(model) for key in group.matrices}
    for name, spec in specs.items():
        module = model.get_submodule(name) if name not in experts else None
        if isinstance(module, nn.Embedding):
            attach_embedding(module, name, spec, dtype)
            if describe(model).tied:  # type: ignore[arg-type]
                why = "what is beside one of two tied ends is not dealt to stages"
                model.refused_layouts = {**getattr(model, "refused_layouts", {}), "pp": why}  # type: ignore[assignment]
        elif (group := experts.get(name)) is not None:
            if spec.dora:
                what = f"DoRA has no lengths for matrices of fused experts ({name}), and neither has PEFT"
                remedy = "name other layers in adapter.target (attn), or leave adapter.dora out"
                raise ConfigError(what, where="adapter.dora", remedy=remedy)
            attach_experts(model.get_submodule(group.name), group, name.rpartition(".")[2], spec, dtype)
        else:
            attach(model.get_submodule(name), spec, dtype)
    model.lora_trained = tuple(trained)  # type: ignore[assignment]


def wholly_trained(model: nn.Module) -> tuple[str, ...]:
    """Full names of the modules that are trained whole beside the adapters."""
    names: Any = getattr(model, "lora_trained", ())
    return tuple(names)


def beside(model: Any) -> Any:
    """A second model over the very same base weights, without adapters: what each adapts and trains is its own.

    Args:
        model: a Transformers model, adapters in place or not. Of modules that it trains whole the second model gets
            copies.
    """
    trained = tuple(f"{name}." for name in wholly_trained(model))
    shared = [
        tensor
        for name, tensor in model.named_parameters()
        if not is_adapter_weight(name) and not name.startswith(trained)
    ]
    memo = {id(tensor): tensor for tensor in [*shared, *model.buffers()]}
    other = copy.deepcopy(model, memo)
    for module in list(other.modules()):
        if isinstance(module, LoraLayer):
            detach(module)
        elif isinstance(module, LoraEmbedding):
            detach_embedding(module)
        elif isinstance(module, LoraExperts):
            detach_experts(module)
    detach_rows(other)
    detach_learned(other)
    vars(other).pop("lora_trained", None)
    return other


def freeze(model: nn.Module) -> None:
    """Let adapters and the modules trained whole require gradients, and nothing else. May be called at any time."""
    chosen = {id(p) for name in wholly_trained(model) for p in model.get_submodule(name).parameters()}
    for _, layer in adapted(model):
        chosen |= {id(layer.lora_A.weight), id(layer.lora_B.weight)}
        if not isinstance(layer, ExpertsAdapter) and layer.lora_spec.dora:
            chosen.add(id(layer.lora_magnitude_vector.weight))
    chosen |= {id(own.trainable_tokens_delta) for own in rows_of(model).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def trains_one_end(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether just one of embedding and head is trained whole, so that a tie between them cannot stand."""
    return sum(_ends_trained(model, anatomy)) == 1


def both_ends_trained(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether embedding and head are trained whole, and as one matrix."""
    return anatomy.tied and sum(_ends_trained(model, anatomy)) == 2


def _ends_trained(model: nn.Module, anatomy: Anatomy) -> list[bool]:
    ends = [end for end in (anatomy.embedding, anatomy.head) if end is not None]
    return [any(f"{end}.".startswith(f"{name}.") for name in wholly_trained(model)) for end in ends]


def part_when_cut(model: Any) -> None:
    """Let `part_on_meta` know that both ends of a tie will be given values, which differ."""
    model.lora_ends_differ = True


def part_on_meta(model: Any, anatomy: Anatomy) -> None:
    """Let go of a tie that cannot stand before the model is sharded: afterwards two weights in one shard stay one.

    `settle_ties` gives the two the same values when they are there.

    Args:
        model: on meta, cut to what this rank has; nothing aliased yet.
        anatomy: of the whole model: a stage that lacks one of the two exports the same config.
    """
    differ = vars(model).pop("lora_ends_differ", False)
    if not (anatomy.tied and (differ or trains_one_end(model, anatomy))):
        return
    ends = {f"{anatomy.head}.weight", f"{anatomy.embedding}.weight"}
    tied = model.all_tied_weights_keys
    model.lora_parted = {target: tied.pop(target) for target in ends & tied.keys()}
    model.config.tie_word_embeddings = False


@torch.no_grad()
def settle_ties(model: Any) -> None:
    """Untie embedding and head where just one of the two is trained whole; if both are they stay one matrix.

    So what is not named never changes. An adapter beside a tied head needs no untying while it trains: the shared
    matrix is frozen, and only merging parts the two.
    """
    parted: dict[str, str] = vars(model).pop("lora_parted", {})
    for target, owner in parted.items():
        local_part(model.get_parameter(target)).copy_(local_part(model.get_parameter(owner)))
    anatomy = describe(model)
    if anatomy.tied and trains_one_end(model, anatomy):
        untie(model)


def untie(model: Any) -> None:
    """Give the head a weight of its own, equal to the embedding's, and let the model's config say so."""
    anatomy = describe(model)
    assert anatomy.head is not None
    head, embedding = model.get_submodule(anatomy.head), model.get_submodule(anatomy.embedding)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for name in (f"{anatomy.head}.weight", f"{anatomy.embedding}.weight"):
        model.all_tied_weights_keys.pop(name, None)
    model.config.tie_word_embeddings = False
