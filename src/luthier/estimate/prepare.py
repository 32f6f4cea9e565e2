"""A run's model on meta, measured: the part of an estimate that needs torch and Transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from luthier.adapters import LoraReport, apply_adapter, is_adapter_weight, quantizable, quantized_report
from luthier.adapters.rows import NewTokens
from luthier.adapters.structure import settle_ties
from luthier.config import AdapterConfig, LoraConfig, RunConfig
from luthier.config.methods import SftConfig
from luthier.config.sections import AdamWConfig
from luthier.engine.build import DTYPES, choose_precision
from luthier.estimate.measure import measure
from luthier.estimate.models import full_name, known
from luthier.estimate.shape import ModelShape
from luthier.hf.anatomy import describe
from luthier.hf.classifier import attach_score
from luthier.hf.kinds import sees
from luthier.hf.load import build_on_meta, tie_on_meta, trainable_class
from luthier.hf.nf4 import expected_bytes
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.source import ModelSource, config_from_fields, explain, load_config, named_in, resolve
from luthier.optim.build import build_optimizer
from luthier.parallel import rules
from luthier.parallel.layout import Layout, Refusal
from luthier.parallel.programs import stages_of


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run's model, measured.

    Attributes:
        model: on meta, adapters in place.
        shape: its sizes.
        adapter: what was adapted, in a line.
        precision: of weights and arithmetic.
    """

    model: Any
    shape: ModelShape
    adapter: str | None
    precision: str


def _tokens(model: Any, adapter: AdapterConfig) -> NewTokens | None:
    """As many rows as new tokens are named; which they are makes no difference to what a run takes."""
    count = len(adapter.new_tokens) if isinstance(adapter, LoraConfig) else 0
    last = len(model.get_input_embeddings().weight)
    return NewTokens(tuple(range(last - count, last))) if count else None


def prepare(config: RunConfig, *, cpu: bool) -> Prepared:
    """Build a run's model on meta and measure it. Nothing but its `config.json` is read, no weight and no row.

    Args:
        config: of the run; data may be empty.
        cpu: for the CPU.

    Raises:
        ModelError: the model's config cannot be found or read, or is of no model that a run can train.
    """
    source, own = find_model(config.model, config.revision)
    trust = config.trust_remote_code
    own = own if own is not None else load_config(source, trust_remote_code=trust)
    precision = config.train.precision or ("bf16" if not cpu else choose_precision(None, torch.device("cpu")))
    cls = trainable_class(source, own, trust_remote_code=trust)
    try:
        model: Any = build_on_meta(cls, own)
    except RAISED_BY_MODELS as error:  # a config that no model can be made of
        raise explain(source, error, "the model") from error
    for parameter in model.parameters():  # not the buffers: rope's frequencies stay fp32
        parameter.data = parameter.data.to(DTYPES[precision])
    line, quantised = None, {}
    if config.adapter is not None:
        report = apply_adapter(model, config.adapter, config.seed, _tokens(model, config.adapter))
        if isinstance(report, LoraReport) and isinstance(config.adapter, LoraConfig) and config.adapter.quantize:
            double = config.adapter.double_quantize
            names = quantizable(model)
            quantised = {name: expected_bytes(model.get_parameter(name).numel(), double) for name in names}
            report = replace(report, quantized=str(quantized_report(model, names, double)))
        line = str(report)
    settle_ties(model)
    tie_on_meta(model)
    scores = config.method.name == "reward"
    if scores:
        attach_score(model, config.seed)
    inside = tuple(f"{layer}." for layer in describe(model).layers)
    optimizer = build_optimizer(
        model.named_parameters(),
        config.optimizer,
        adapters=is_adapter_weight,
        hidden_matrices=lambda name: name.startswith(inside),
    )
    length = config.data.sequence_length
    shape = measure(model, optimizer, length=length, cpu=cpu, quantised=quantised)
    if scores:  # of one number, at one place of each text
        shape = replace(shape, vocabulary=1, head_forward=0, head_backward=0, head_trains=False)
    return Prepared(model, shape, line, precision)


def prepare_other(config: RunConfig, field: str, model: str, revision: str | None, *, cpu: bool) -> Prepared:
    """A second model, a reference or a teacher, in the precision of the first. It does not train.

    Args:
        config: of the run.
        field: that names the second.
        model: the second, named as the first is.
        revision: of a Hub model.
        cpu: for the CPU.
    """
    plain = {"method": SftConfig(), "adapter": None, "optimizer": AdamWConfig()}
    other = config.model_copy(update={"model": model, "revision": revision, **plain})
    with named_in(field):
        return prepare(other, cpu=cpu)


def find_model(model: str, revision: str | None = None) -> tuple[ModelSource, Any | None]:
    """What a model string means for an estimate.

    Args:
        model: as `resolve` reads it; of a model in the table the owner may be left out.
        revision: of a Hub model; then the table is not asked.

    Returns:
        the source, and the config where the table has it.

    Raises:
        ModelError: there is no such file, directory, package or model type.
    """
    full = full_name(model)
    source = resolve(full or model, revision=revision)
    if full is None or source.kind != "hub" or revision is not None:
        return source, None
    return source, config_from_fields(known()[full])


def refusals(prepared: Prepared, config: RunConfig) -> Refusal:
    """Says which degrees a run's model and optimizer admit, for a search: the model is cut down to what that takes."""
    _shorten(prepared.model, prepared.shape)
    reason = rules.refusals(prepared.model, optimizer=config.optimizer, pictures=has_pictures(config))
    layers = len(prepared.shape.layers)

    def refusal(name: str, degree: int) -> str | None:
        if name == "pp" and degree > 1:  # the number of layers aside, what cuts a model in two cuts it anywhere
            return "it has too few layers" if degree > layers else reason(name, 2)
        return reason(name, degree)

    return refusal


def check(prepared: Prepared, config: RunConfig, layout: Layout, reference: Any = None) -> None:
    """Refuse a layout as training does.

    Args:
        prepared: the model that trains.
        config: of the run.
        layout: asked for.
        reference: on meta, what is to be laid out as the model is; None without one.

    Raises:
        ConfigError: with the reason; so `rules`.
    """
    stages = stages_of(config.parallel.pipeline_schedule, config.parallel.stages_per_rank)
    if sees(prepared.model.config) and has_pictures(config):
        rules.check_pictures(layout)
    rules.check(prepared.model, layout, stages, config.optimizer)
    if reference is not None:
        rules.check(reference, layout, stages)


def unseen(prepared: Prepared, config: RunConfig, layout: Layout) -> list[str]:
    """What rows would be refused for that have images, where the run does not say whether they have."""
    seeing = prepared.model.config
    if not sees(seeing) or has_pictures(config) or not any(getattr(layout, name) > 1 for name in rules.REFUSALS):
        return []
    return ["rows with images would be refused: they have dp_shard and dp_replicate alone"]


def has_pictures(config: RunConfig) -> bool:
    """Whether a run says that its rows have images; without a word of it they may have some, and no row is read."""
    return any(source.image_column for source in [*(config.data.train or []), *(config.data.validation or [])])


def _shorten(model: Any, shape: ModelShape) -> None:
    """Leave a model two layers, and one of every other kind: enough to say which degrees it admits, and fast."""
    layers = describe(model).layers
    parents = {name.rpartition(".")[0] for name in layers}
    if len(parents) != 1:
        return
    seen: set[int] = set()
    kept = []
    for index, layer in enumerate(shape.layers):
        if index < 2 or id(layer) not in seen:
            kept.append(layers[index])
        seen.add(id(layer))
    model.set_submodule(parents.pop(), nn.ModuleList(model.get_submodule(name) for name in kept))
